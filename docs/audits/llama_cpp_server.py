"""Start llama.cpp's server from the PyPI package xllamacpp: MODE PORT MODEL [DRAFT]."""

import sys
import time

import xllamacpp

MODES = {
    "plain": None,
    "ngram": "NGRAM_SIMPLE",
    "draft": "DRAFT_SIMPLE",
    "draft-probabilistic": "DRAFT_SIMPLE",
}
mode, port, model = sys.argv[1], int(sys.argv[2]), sys.argv[3]
params = xllamacpp.CommonParams()
params.model.path, params.port, params.n_ctx, params.n_parallel = model, port, 8192, 4
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
spec = params.speculative
if MODES[mode]:
    kind = f"COMMON_SPECULATIVE_TYPE_{MODES[mode]}"
    spec.types = [getattr(xllamacpp.common_speculative_type, kind)]
if mode == "ngram":
    spec.ngram_simple.size_n, spec.ngram_simple.size_m = 2, 8
if mode.startswith("draft"):
    spec.draft.mparams.path = sys.argv[4]
    spec.draft.cpuparams.n_threads = spec.draft.cpuparams_batch.n_threads = 1
    spec.draft.probabilistic = mode == "draft-probabilistic"
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
time.sleep(1e9)
