"""SGLang with its EAGLE workers on the CPU engine, against SGLang without speculation on the same engine."""

import itertools
import json
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

SPECULATION = ["--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "3"]
TREE = [*SPECULATION, "--speculative-eagle-topk", "4", "--speculative-num-draft-tokens", "8"]
CHAIN = [*SPECULATION, "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"]
JSON_SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "count": {"enum": [1, 2, 3]}},
        "required": ["name", "count"],
        "additionalProperties": False,
    }
)
# Each is answered by both servers, and the answers must be the same.
GREEDY_REQUESTS = {
    "regular expression": {"regex": "[a-e]{3,6} [0-9]{3}(, [a-z]+){2}\\.", "ignore_eos": False},
    "JSON schema": {"json_schema": JSON_SCHEMA, "ignore_eos": False},
    "stop string": {"stop": [" t"], "ignore_eos": False},
    "stop token": {"stop_token_ids": list(range(300, 400)), "ignore_eos": False},
    "minimum length": {"min_new_tokens": 30, "ignore_eos": False},
    "one token": {"max_new_tokens": 1},
}
# Broad enough that many words occur, and each filter alone: SGLang's two samplers combine them differently.
SAMPLING = {
    "temperature": {"temperature": 1.5},
    "top-p": {"temperature": 1.5, "top_p": 0.8},
    "top-k": {"temperature": 1.5, "top_k": 6},
}
SAMPLES = 600


def all_at_once(server, prompts, **fields):
    """The answers to all prompts, ten of them at any time: requests join and leave the batch all along."""
    with ThreadPoolExecutor(10) as pool:
        lengths = itertools.cycle([24, 33, 48])
        answers = pool.map(lambda each: server.generate(each[0], each[1], **fields), zip(prompts, lengths))  # noqa: B905
        return [answer["output_ids"] for answer in answers]


def sampled(server, prompt, fields):
    """How often each pair of a second and a third word was drawn; prefill draws the first."""
    answers = server.generate([prompt] * SAMPLES, 3, **fields)
    return Counter(tuple(answer["output_ids"][1:]) for answer in answers)


@pytest.fixture(scope="module")
def plain(start_server, prompts):
    """What SGLang says without speculation; the server is gone by then, for an idle one takes a core."""
    with start_server() as server:
        return {
            "greedy": all_at_once(server, prompts),
            "log-probs": server.generate(prompts[0], 24, return_logprob=True, top_logprobs_num=3)["meta_info"],
            "requests": {name: server.generate(prompts[1], 120, **f) for name, f in GREEDY_REQUESTS.items()},
            "samples": {name: sampled(server, prompts[2], fields) for name, fields in SAMPLING.items()},
        }


@pytest.fixture(scope="module")
def tree(start_server):
    """EAGLEWorker with a tree."""
    with start_server(*TREE) as server:
        yield server


@pytest.fixture(scope="module")
def overlap(start_server):
    """EAGLEWorkerV2, in the overlap loop."""
    with start_server(*CHAIN) as server:
        yield server


@pytest.fixture(scope="module", params=["tree", "overlap"])
def speculative(request, plain):
    """Either server, started after the plain one has gone: one at a time."""
    return request.getfixturevalue(request.param)


def worker(server):
    log = server.log.read_text()
    return "v2" if "Spec v2 is enabled" in log else "v1" if "Spec v1 is used" in log else None


def accept_length(server, prompt):
    return server.generate(prompt, 48)["meta_info"]["spec_accept_length"]


def assert_same_distribution(one: Counter, other: Counter):
    """Pearson's test that two samples come from one distribution; fails by chance once in millions of runs."""
    total_one, total_other = one.total(), other.total()
    cells, rest = [], [0, 0]
    for key in one.keys() | other.keys():
        if one[key] + other[key] >= 20:
            cells.append([one[key], other[key]])
        else:
            rest = [rest[0] + one[key], rest[1] + other[key]]
    cells += [rest] if sum(rest) >= 20 else []
    assert len(cells) >= 5, f"too few different words to tell anything: {one.most_common(5)}, {other.most_common(5)}"
    statistic = sum(
        (a * (total_other / total_one) ** 0.5 - b * (total_one / total_other) ** 0.5) ** 2 / (a + b) for a, b in cells
    )
    freedom = len(cells) - 1
    # Wilson and Hilferty: the cube root of a chi-squared variable is nearly normal.
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    assert z < 5, f"z = {z:.1f} with {len(cells)} cells: {one.most_common(5)}, {other.most_common(5)}"


def test_the_engine_says_that_it_is_there(speculative, request):
    installed = re.findall(
        r"^sglang-cpu-engine: installed in process (\d+), SGLang (\S+)$", speculative.log.read_text(), re.M
    )
    assert len({pid for pid, _ in installed}) == 2, "the main process and the scheduler"
    assert worker(speculative) == {"tree": "v1", "overlap": "v2"}[request.node.callspec.params["speculative"]]


def test_greedy_output_is_that_of_plain_decoding(speculative, plain, prompts):
    assert all_at_once(speculative, prompts) == plain["greedy"]
    assert accept_length(speculative, prompts[0]) > 1.5, "equal for the reason that nothing was ever accepted"


@pytest.mark.parametrize("name", GREEDY_REQUESTS)
def test_what_a_request_may_ask_for(speculative, plain, prompts, name):
    expected = plain["requests"][name]
    answer = speculative.generate(prompts[1], 120, **GREEDY_REQUESTS[name])
    assert answer["text"] == expected["text"]
    assert answer["meta_info"]["finish_reason"] == expected["meta_info"]["finish_reason"]
    if name == "regular expression":
        assert re.fullmatch(GREEDY_REQUESTS[name]["regex"], answer["text"])
    if name == "JSON schema":
        assert json.loads(answer["text"]).keys() == {"name", "count"}
    if name.startswith("stop"):
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"


def test_log_probabilities(speculative, plain, prompts):
    found = speculative.generate(prompts[0], 24, return_logprob=True, top_logprobs_num=3)["meta_info"]
    expected = plain["log-probs"]
    assert len(found["output_token_logprobs"]) == 24
    for kind in ("output_token_logprobs", "output_top_logprobs"):
        flat = [
            [entry for position in meta[kind] for entry in (position if kind.endswith("top_logprobs") else [position])]
            for meta in (found, expected)
        ]
        assert [token for _, token, _ in flat[0]] == [token for _, token, _ in flat[1]]
        assert [value for value, _, _ in flat[0]] == pytest.approx([value for value, _, _ in flat[1]], abs=1e-3)


@pytest.mark.parametrize("name", SAMPLING)
def test_sampling_is_sampling(speculative, plain, prompts, name):
    assert_same_distribution(sampled(speculative, prompts[2], SAMPLING[name]), plain["samples"][name])


def test_penalties_change_the_output(speculative, prompts):
    """SGLang itself applies them more loosely under speculation, so there is nothing equal to compare with."""
    free = speculative.generate(prompts[3], 60)["output_ids"]
    penalised = speculative.generate(prompts[3], 60, frequency_penalty=2.0, presence_penalty=1.0)["output_ids"]
    assert len(penalised) == 60
    assert penalised != free


def test_streaming(speculative, prompts):
    request = {
        "input_ids": prompts[4],
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True},
    }
    with speculative.client.stream("POST", "/generate", json=request) as response:
        chunks = [json.loads(line[6:])["text"] for line in response.iter_lines() if line.startswith("data: {")]
    assert chunks[-1] == speculative.generate(prompts[4], 40)["text"]
    assert len(set(chunks)) > 5
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(chunks))


def test_aborted_requests_leave_no_trace(speculative, plain, prompts):
    """The scheduler counts its slots at each step; a server that lost one is a dead server."""
    with ThreadPoolExecutor(5) as pool:
        running = [pool.submit(speculative.generate, prompts[i], 1500, rid=f"abort-{i}") for i in range(5)]
        while speculative.client.get("/server_info").json()["internal_states"][0].get("last_gen_throughput") is None:
            time.sleep(0.05)
        time.sleep(0.5)
        for i in range(5):
            speculative.client.post("/abort_request", json={"rid": f"abort-{i}"}).raise_for_status()
        reasons = [answer.result()["meta_info"]["finish_reason"]["type"] for answer in running]
    assert reasons == ["abort"] * 5
    assert all_at_once(speculative, prompts[:6]) == plain["greedy"][:6]


def test_prefixes_in_the_radix_cache(speculative, prompts):
    speculative.client.post("/flush_cache").raise_for_status()
    first, second = (speculative.generate(prompts[5] + prompts[6], 32) for _ in range(2))
    assert first["meta_info"]["cached_tokens"] == 0
    # All but the last token, and one less because EAGLE's cache goes by pairs of tokens.
    assert second["meta_info"]["cached_tokens"] == len(prompts[5] + prompts[6]) - 2
    assert second["output_ids"] == first["output_ids"]


def test_chat(speculative):
    request = {"model": "default", "messages": [{"role": "user", "content": "Tell me about bread."}], "max_tokens": 32}
    answer = speculative.client.post("/v1/chat/completions", json=request).json()
    assert answer["choices"][0]["message"]["content"].strip()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param([*TREE, "--tp-size", "2"], id="two ranks"),
        pytest.param([*CHAIN, "--disable-overlap-schedule", "--page-size", "16"], id="v1, chain, pages"),
        pytest.param([*CHAIN, "--page-size", "16"], id="v2, chain, pages"),
    ],
)
def test_other_configurations(start_server, plain, prompts, options):
    with start_server(*options) as server:
        assert all_at_once(server, prompts) == plain["greedy"]
        assert all_at_once(server, prompts) == plain["greedy"], "with prefixes from the radix cache"
        assert accept_length(server, prompts[0]) > 1.5
        assert_same_distribution(sampled(server, prompts[2], SAMPLING["top-p"]), plain["samples"]["top-p"])
        ranks = 2 if "--tp-size" in options else 1
        assert server.log.read_text().count("sglang-cpu-engine: installed") == ranks + 1
