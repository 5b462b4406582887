#!/usr/bin/env python3
"""llama-bench, llama-server or llama-quantize, by the name it is run under: as
much as tools/bench/peers asks of them, with answers that peers_test.py knows."""
import http.server
import json
import os
import pathlib
import sys

VECTORS = pathlib.Path(__file__).resolve().parents[1] / "data" / "smollm2" / "vectors.json"
NLL_ERROR = 0.01
NO_TEXT, RARE, WRONG = 3, 5, 7  # after so many tokens: nothing told, a target beyond the best, another choice


def option(name, default=""):
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


def bench():
    """Twice as fast with flash attention."""
    rows = []
    for flash in option("-fa").split(","):
        for prompt in option("-p").split(","):
            rows.append({"n_prompt": int(prompt), "n_gen": int(option("-n")), "n_depth": int(option("-d", "0")),
                         "flash_attn": flash == "1", "avg_ts": 100.0 * (1 + int(flash)), "build_number": 7,
                         "build_commit": "stub"})
    print(json.dumps(rows))


def quantize():
    os.symlink(pathlib.Path(sys.argv[2]).resolve(), sys.argv[3])


class Server(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    vectors = json.loads(VECTORS.read_text(encoding="utf-8"))["vectors"]

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        reply = json.dumps(self.answer(body)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def answer(self, body):
        if self.path == "/tokenize":
            return {"tokens": [1, 260]}
        if self.path.startswith("/slots/"):
            file = pathlib.Path(option("--slot-save-path")) / body["filename"]
            if self.path.endswith("=save"):
                file.touch()
            return {"found": file.stat().st_size}
        if body.get("n_probs"):
            return self.probabilities(body)
        ms = (5.0 if "--cache-reuse" in sys.argv else 10.0) + (option("--flash-attn") == "off")
        return {"timings": {"prompt_ms": ms, "prompt_n": 33}, "tokens_predicted": body["n_predict"]}

    def probabilities(self, body):
        ids = body["prompt"]
        at = len(ids)
        vector = next(vector for vector in self.vectors if vector["ids"][:at] == ids)
        if at == NO_TEXT and not body["logit_bias"]:
            return {}
        choice = vector["argmax"][at - 1] + (at == WRONG)
        best = {choice: -0.001}
        if at < len(vector["ids"]) and (at != RARE or body["n_probs"] > 1000):
            best.setdefault(vector["ids"][at], 0)
            best[vector["ids"][at]] = -vector["nll"][at - 1] - NLL_ERROR
            best[choice] = max(best.values())
            if choice != vector["ids"][at]:
                best[choice] += 0.5
        if "LLAMA_STUB_BIASED" in os.environ:  # a server that tells what a bias has changed
            best[choice] += sum(bias for _, bias in body["logit_bias"])
        return {"completion_probabilities": [
            {"top_logprobs": [{"id": id, "logprob": logprob} for id, logprob in best.items()]}]}

    def log_message(self, *arguments):
        pass


def server():
    if "--version" in sys.argv:
        print("version: 7 (stub)\nbuilt for a test", file=sys.stderr)
        return
    http.server.ThreadingHTTPServer(("127.0.0.1", int(option("--port"))), Server).serve_forever()


if __name__ == "__main__":
    {"llama-bench": bench, "llama-server": server, "llama-quantize": quantize}[pathlib.Path(sys.argv[0]).name]()
