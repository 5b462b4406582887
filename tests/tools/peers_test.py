#!/usr/bin/env python3
"""tools/bench/peers against stubs of llama.cpp's programs (llama_stub.py), ours
being the real ones:  tests/tools/peers_test.py BIN"""
import importlib.machinery
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import types
import unittest

HERE = pathlib.Path(__file__).resolve().parent
PEERS = HERE.parents[1] / "tools" / "bench" / "peers"
BIN = pathlib.Path(sys.argv[-1])
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache")) / "promptcache"
MODEL = "models/SmolLM2-135M-Instruct.Q4_1.gguf"


def load_peers():
    loader = importlib.machinery.SourceFileLoader("peers", str(PEERS))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("peers", loader))
    loader.exec_module(module)
    return module


class PeersTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="peers_test.")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        # A cache of its own: what a stub makes of the model is no file for others.
        (self.folder / "promptcache" / "models").mkdir(parents=True)
        (self.folder / "promptcache" / MODEL).symlink_to(CACHE / MODEL)
        for name in ("llama-bench", "llama-server", "llama-quantize"):
            (self.folder / name).symlink_to(HERE / "llama_stub.py")

    def start(self, only, programs, *options, **environment):
        paths = [word for name in programs for word in (f"--{name}", self.folder / name)]
        return subprocess.run([sys.executable, PEERS, "--only", only, "--small", "--json", "--bin", BIN, *paths,
                               *options], check=False, capture_output=True, text=True,
                              env=os.environ | {"XDG_CACHE_HOME": str(self.folder)} | environment)

    def run_peers(self, *arguments, **environment):
        run = self.start(*arguments, **environment)
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertNotIn("fetching", run.stderr)
        out = json.loads(run.stdout)
        for row in out["results"]:
            self.assertIsNotNone(row["peer"], row)
            self.assertLessEqual({"name", "ours", "peer", "ratio", "our_settings", "peer_settings"}, row.keys())
        return out, {row["name"]: row for row in out["results"]}

    def test_speed_uses_the_given_program_and_tells_what_is_left_out(self):
        out, rows = self.run_peers("speed", ["llama-bench"], "--types", "Q4_1", "Q8_0")
        self.assertEqual(list(rows), ["Q4_1 prefill 16", "Q4_1 prefill 32", "Q4_1 decode 64 after 16"])
        self.assertIn("Q8_0", out["left_out"][0])
        self.assertEqual(out["conditions"]["held_against"], f"llama.cpp: {self.folder}/llama-bench (build 7, stub)")
        self.assertEqual(rows["Q4_1 prefill 16"]["peer"], 200)
        self.assertIn("flash attention on", rows["Q4_1 prefill 16"]["peer_settings"])

    def test_edits_are_held_against_the_fastest_setting_and_the_fastest_exact_one(self):
        out, rows = self.run_peers("edits", ["llama-server"])
        self.assertEqual(len(rows), 10)
        fastest, exact = rows["two modules swapped"], rows["two modules swapped, llama.cpp exact"]
        self.assertEqual((fastest["peer"], fastest["peer_exactness"]), (5, "approximate"))
        self.assertEqual((exact["peer"], exact["peer_exactness"]), (10, "exact"))
        self.assertIn("--cache-reuse 32", fastest["peer_settings"])
        self.assertEqual(len(fastest["peer_settings_tried"]), 4)
        self.assertIn("version: 7 (stub)", out["conditions"]["held_against"])

    def test_batch_tries_settings_and_tells_what_memory_is(self):
        _, rows = self.run_peers("batch", ["llama-server"], "--our-running", "2", "4", "--repeat", "2")
        throughput, memory = rows["4 callers, 2 at a time: throughput"], rows["4 callers, 2 at a time: peak memory"]
        self.assertEqual(len(throughput["peer_settings_tried"]), 3)
        self.assertGreater(throughput["ratio"], 0)
        self.assertIn("--device_bytes=", memory["our_settings"])
        self.assertIn("PSS", memory["peer_settings"])

    def test_error_compares_the_same_positions(self):
        out, rows = self.run_peers("error", ["llama-server", "llama-quantize"], "--types", "Q4_1", "Q8_0")
        self.assertEqual(out["left_out"], [])
        for kind in ("Q4_1", "Q8_0"):
            choices, nll = rows[f"{kind} first choices that differ"], rows[f"{kind} worst mean nll of a text"]
            self.assertEqual(choices["peer"], round(100 / 76, 4))  # of the first text
            self.assertAlmostEqual(nll["peer"], 0.01)
            self.assertEqual((nll["choices_left_out_of_both"], nll["nll_left_out_of_peer"]), (0, 0))

    def test_what_the_server_does_not_tell_is_left_out_of_both(self):
        _, rows = self.run_peers("error", ["llama-server"], LLAMA_STUB_BIASED="1")
        choices = rows["Q4_1 first choices that differ"]
        self.assertEqual((choices["choices_left_out_of_both"], choices["nll_left_out_of_peer"]), (1, 1))
        self.assertEqual(choices["peer"], round(100 / 75, 4))

    def test_nothing_is_built_for_a_part_whose_program_was_not_named(self):
        run = self.start("edits", ["llama-bench"])
        self.assertNotEqual(run.returncode, 0)
        self.assertEqual(json.loads(run.stdout)["left_out"], ["edits: no --llama-server"])
        run = self.start("speed", ["llama-bench"], "--llama-server", "/nowhere/llama-server")
        self.assertIn("no such program", run.stderr)

    def test_a_part_that_fails_is_told_with_what_was_measured(self):
        (self.folder / "llama-bench").unlink()
        (self.folder / "llama-bench").symlink_to("/bin/false")
        run = self.start("speed", ["llama-bench"])
        self.assertEqual(run.returncode, 1)
        self.assertIn("speed, which failed", json.loads(run.stdout)["left_out"][0])


class UnitTest(unittest.TestCase):
    peers = load_peers()

    def test_no_ratio_where_a_value_is_zero(self):
        row = self.peers.measure("errors", [0.0], [1.0], "%", False)
        self.assertEqual((row["ours"], row["peer"], row["ratio"]), (0, 1, None))
        self.assertIsNone(self.peers.measure("errors", [1.0], [0.0], "%", True)["ratio"])
        self.assertEqual(self.peers.measure("ms", [2.0], [4.0], "ms", False)["ratio"], 2)

    def test_a_server_that_ends_is_not_taken_for_one_that_answers(self):
        programs = types.SimpleNamespace(get=lambda name: "/bin/false", note_version=lambda name: None)
        args = types.SimpleNamespace(programs=programs, threads=1, llama_options=[])
        with tempfile.TemporaryDirectory() as name, self.assertRaisesRegex(RuntimeError, "llama-server ended"):
            self.peers.LlamaServer(args, "model", pathlib.Path(name), self.peers.LlamaSetting("on"))


if __name__ == "__main__":
    if not (CACHE / MODEL).exists():
        sys.exit(f"{CACHE / MODEL} is missing: run tools/fetch_model")
    unittest.main(argv=sys.argv[:1])
