"""What the engine tests share: SGLang's interpreter, the CPU engine built, the model, prompts, and servers."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
from importlib.metadata import version
from pathlib import Path

import httpx
import pytest
from spec_gate import patching, series
from uv import find_uv_bin

from rehearsal import engine


@pytest.fixture(scope="session")
def engine_python():
    """The interpreter of the environment that files/locks pins. It is shared: packages go onto PYTHONPATH."""
    return engine.ensure_environment()


@pytest.fixture(scope="session")
def pair():
    """The rehearsal model: a folder with `target` and `draft`."""
    return engine.ensure_model()


@pytest.fixture(scope="session")
def cpu_engine(engine_python, tmp_path_factory):
    """A folder for PYTHONPATH with the CPU engine installed, and pytest for what runs beside SGLang."""
    folder = tmp_path_factory.mktemp("cpu_engine")
    source = folder / "source"  # setuptools leaves its build beside the sources
    shutil.copytree(engine.CHECKOUT / "files/cpu_engine", source)
    install = [find_uv_bin(), "pip", "install", "--quiet", "--python", engine_python, "--target", folder / "site"]
    subprocess.run([*install, "--no-deps", "--no-build-isolation", source], check=True)
    subprocess.run([*install, f"pytest=={version('pytest')}"], check=True)
    return folder / "site"


@pytest.fixture(scope="session")
def engine_environment(cpu_engine):
    return os.environ | {
        "PYTHONPATH": str(cpu_engine),
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        # The scheduler counts its KV slots when it is idle, and with this at each step as well, where it can (top-k 1);
        # it ends when one is lost.
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    }


@pytest.fixture(scope="session")
def make_overlay(engine_python, cpu_engine, tmp_path_factory):
    """Makes a folder for PYTHONPATH with the gate and a private copy of the released SGLang, to be patched."""
    where = [engine_python, "-I", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    installed = Path(subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip())
    (name,) = (path.name for path in installed.glob("sglang-*.dist-info"))

    def make():
        overlay = tmp_path_factory.mktemp("overlay")
        shutil.copytree(cpu_engine, overlay, dirs_exist_ok=True)
        shutil.copytree(installed / "sglang", overlay / "sglang", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(installed / name, overlay / name)
        source = overlay / "source"  # setuptools leaves its build beside the sources
        shutil.copytree(engine.CHECKOUT / "files/spec_gate", source)
        install = [find_uv_bin(), "pip", "install", "--quiet", "--python", engine_python, "--target", overlay]
        subprocess.run([*install, "--no-deps", "--no-build-isolation", source], check=True)
        return overlay

    return make


@pytest.fixture(scope="session")
def gated(make_overlay):
    """A folder for PYTHONPATH with SGLang patched."""
    overlay = make_overlay()
    assert patching.convert(overlay, series.load(overlay), "applied")
    return overlay


class Server:
    """A running server: ``client`` speaks to it, ``log`` is its log file."""

    def __init__(self, address: str, log: Path):
        self.address, self.log = address, log
        self.client = httpx.Client(base_url=address, timeout=300)

    def generate(self, prompt, tokens=32, **fields):
        """The answers to ``/generate``, greedy and of full length unless `fields` say otherwise.

        :param prompt: text, token ids, or a list of either: then a list of answers comes back
        :param fields: fields of the request; those that it does not know itself are sampling parameters
        """
        request_fields = {"rid", "return_logprob", "top_logprobs_num", "logprob_start_len"}
        request = {name: value for name, value in fields.items() if name in request_fields}
        sampling = {name: value for name, value in fields.items() if name not in request_fields}
        ids = not isinstance(prompt, str) and not isinstance(prompt[0], str)
        request["input_ids" if ids else "text"] = prompt
        request["sampling_params"] = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True} | sampling
        answer = self.client.post("/generate", json=request)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture(scope="session")
def start_server(engine_python, engine_environment, pair, tmp_path_factory):
    """A context manager that starts SGLang with more options, waits until it is ready, and always stops it."""

    @contextlib.contextmanager
    def start(*options: str, **environment: str):
        folder = tmp_path_factory.mktemp("server")
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        command = [engine_python, "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--model-path", pair / "target", "--dtype", "float32", "--device", "cpu", "--sleep-on-idle"]
        command += ["--max-total-tokens", "16384", "--max-running-requests", "16", "--mem-fraction-static", "0.1"]
        if "--speculative-algorithm" in options:
            command += ["--speculative-draft-model-path", pair / "draft"]
        log = folder / "log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [*map(str, command), *options],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=engine_environment | environment,
                cwd=folder,
                start_new_session=True,
            )
        try:
            while "ready to roll!" not in log.read_text():
                if process.poll() is not None:
                    pytest.fail(f"the server ended with {process.returncode}:\n{log.read_text()[-5000:]}")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=0.3)
            yield Server(f"http://127.0.0.1:{port}", log)
        except httpx.TransportError as error:
            pytest.fail(f"the server did not answer: {error!r}:\n{log.read_text()[-5000:]}")
        else:
            if process.poll() is not None or "Traceback" in log.read_text():
                pytest.fail(f"the server failed, exit status {process.poll()}:\n{log.read_text()[-5000:]}")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    return start


@pytest.fixture(scope="session")
def prompts(engine_python, pair):
    """Token ids of 32 questions, as the model's chat template writes them."""
    things = ["a lamp", "the river", "my garden", "an old clock", "this bread", "the train", "a letter", "our boat"]
    forms = ["What is {}?", "Tell me about {}, please.", "Where did you see {} last week?", "Why do you like {}?"]
    texts = [f"<|user|>{form.format(thing)}<|end|><|assistant|>" for form in forms for thing in things]
    code = "import json, sys, tokenizers; tokenizer = tokenizers.Tokenizer.from_file(sys.argv[1]); "
    code += "print(json.dumps([tokenizer.encode(text).ids for text in json.load(sys.stdin)]))"
    encode = [engine_python, "-I", "-c", code, pair / "target/tokenizer.json"]
    return json.loads(
        subprocess.run(encode, input=json.dumps(texts), check=True, capture_output=True, text=True).stdout
    )
