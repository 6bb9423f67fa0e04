"""A load gate for SGLang's speculative decoding: off when the running batch is large, on again when it is small."""
