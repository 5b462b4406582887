#!/usr/bin/env python3
"""Makes tests/data/chat_template: conversations as models' own chat templates render them.

    pip install transformers==5.24.0 tokenizers==0.23.3      (not for the product)
    tools/make_chat_template_vectors.py LLAMA_CPP EXTRA tests/data/chat_template [--all-sources]

LLAMA_CPP: vendor/llama.cpp of the source distribution of llama-cpp-python 0.3.36: templates as their authors publish them (in
models/templates, and as strings in tests/test-chat-template.cpp) and vocabularies. EXTRA: a folder with SmolLM2 (tools/fetch_model)
and the two that LLAMA_CPP lacks, out of tokenizer_config.json: llama-2-chat.jinja (meta-llama/Llama-2-7b-chat-hf) and
gemma-3-it.jinja (google/gemma-3-1b-it).
A template is taken only when its SHA-256 is the one below. Sources under Apache-2.0 and MIT are kept beside the values, so that
recognition is tested on them; --all-sources keeps all, for `promptcache check` only, never to be committed.

transformers renders (its own sandbox and options); the text is then cut at the model's control tokens:
* parts: [["c", token] | ["t", text], ...], without the BOS in front, which is the tokenizer's to add. Two things of tokenizers are
  in the parts: white space after Phi-3's control tokens is theirs (`rstrip` in its tokenizer.json), and of text after a control token
  SentencePiece puts the first space itself (Mistral's tokenizer.json: Metaspace, `first`).
* ids, where the vocabulary is at hand: by Hugging Face tokenizers, of the whole rendered text after BOS.
"""

import ast
import hashlib
import json
import pathlib
import re
import struct
import sys

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers.convert_slow_tokenizer import generate_merges
from transformers.utils.chat_template_utils import render_jinja_template

S, U, A = "system", "user", "assistant"
TERSE = (S, "You are a terse assistant.")
CONVERSATIONS = {
    "system_user": [TERSE, (U, "What is a cache?")],
    "system_turns": [TERSE, (U, "Hello"), (A, "Hi there."), (U, "Who are you?")],
    "system_history": [TERSE, (U, "Hello"), (A, "Hi there.")],
    "user": [(U, "What is a cache?")],
    "turns": [(U, "Hello"), (A, "Hi there."), (U, "Who are you?"), (A, "A model."), (U, "Bye")],
    "history": [(U, "Hello"), (A, "Hi there.")],
    "space_around": [(S, " \n Be terse.\t\n"), (U, "\n  Hello there  \n"), (A, "\tHi \n\n there. "), (U, "  Bye\u00a0\u3000")],
    "space_around_user": [(U, "\n  Hello there  \n")],
    "space_only": [(U, " \n ")],
    "empty_system": [(S, ""), (U, "Hello")],
    "empty_user": [(U, "")],
    "empty_answer": [(U, "Hello"), (A, ""), (U, "Hello?")],
    "unicode": [(S, "R\u00e9ponds en fran\u00e7ais."), (U, "\u00bfQu\u00e9? \u4f60\u597d\uff0c\u4e16\u754c \U0001f469\u200d\U0001f4bb \u0939\u093f\u0928\u094d\u0926\u0940"),
                (A, "Stra\u00dfe \u2014 e\u0301"), (U, "\u202eabc")],
    "like_markers": [(U, "[INST user\n\n<<SYS <|im_start <start_of")],
}

CHATML = ["<|im_start|>", "<|im_end|>"]
LLAMA3 = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
MISTRAL = ["<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"]
GEMMA = ["<bos>", "<start_of_turn>", "<end_of_turn>"]
PHI3 = ["<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
S_ONLY = {"system_user", "system_turns", "system_history", "space_around", "empty_system", "unicode"}
# Where our lists differ on purpose or by what a marker cannot say (common/pml/conversation.h, common/README.md).
AFTER_LAST_USER = {"history", "system_history"}

# name here: [where from, SHA-256, control tokens, vocabulary, what else]
FAMILIES = {
    "chatml": ["tests:teknium/OpenHermes-2.5-Mistral-7B", "fcf7a096fe99a48fd9ad2b250bf9237e96e8f48bffec1c7ea4d3f225176cd40e", CHATML, "smollm", {}],
    "smollm2": ["gguf:smollm", "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788", CHATML, "smollm", {}],
    "qwen2": ["gguf:qwen2", "af9c0233881b083b52ff773580215222b5440ac3d0beeeca99b76329b048f8db", CHATML, "qwen2", {}],
    "qwen2.5": ["file:Qwen-Qwen2.5-7B-Instruct", "cd8e9439f0570856fd70470bf8889ebd8b5d1107207f67a5efb46e342330527f", CHATML, "qwen2", {"name": "qwen"}],
    # It renders an answer after the last question with its reasoning.
    "qwen3": ["file:Qwen-Qwen3-0.6B", "87a2728cb8dc9fe424d624542f6060ec05a1d285ebbec578bb078900e33396b5", CHATML, "qwen2", {"skip": AFTER_LAST_USER}],
    "llama2": ["extra:llama-2-chat", "e8d5b5a546d3f19df16a5320c614fab05bdc4edd50e850f1afd947b503ea41cf", ["<s>", "</s>"], "llama-spm", {"name": "llama2"}],
    "llama3": ["tests:Llama-3", "b48c47f6443892716176eb200bf4ef108f64e06ca26ed0fa8ebc0a4b3992fcb2", LLAMA3, "llama-bpe", {"name": "llama3", "always_asks": True}],
    "llama3.1": ["file:meta-llama-Llama-3.1-8B-Instruct", "e10ca381b1ccc5cf9db52e371f3b6651576caee0a630b452e2816b2d404d4b65", LLAMA3, "llama-bpe", {"name": "llama3.1"}],
    "llama3.2": ["file:meta-llama-Llama-3.2-3B-Instruct", "5816fce10444e03c2e9ee1ef8a4a1ea61ae7e69e438613f3b17b69d0426223a4", LLAMA3, "llama-bpe",
                 {"name": "llama3.1", "kwargs": {"date_string": "26 Jul 2024"}}],
    "mistral-v0": ["tests:mistralai/Mistral-7B-Instruct-v0.2 (NOTE: Old pre-v1 without a system prompt)", "26a59556925c987317ce5291811ba3b7f32ec4c647c400c6cc7e3a9993007ba7", ["<s>", "</s>"], "llama-spm", {"name": "mistral-v0"}],
    "mistral-v1": ["tests:mistralai/Mistral-7B-Instruct-v0.2 (mistralai 'v1' template with a system prompt)", "796853172235ab3aaa4810013ddfe2eab481bda3306dad4f700c00d436eed596", ["<s>", "</s>"], None, {"name": "mistral-v1", "spm": True}],
    "mistral-v3": ["tests:Mistral-Large-Instruct-2407 (mistralai 'v3' template; modified to have system prompt at start)", "e16746b40344d6c5b5265988e0328a0bf7277be86f1c335156eae07e29c82826", MISTRAL, None,
                   {"spm": True, "skip": {"system_history"}}],
    "mistral-nemo": ["file:mistralai-Mistral-Nemo-Instruct-2407", "e4676cb56dffea7782fd3e2b577cfaf1e123537e6ef49b3ec7caa6c095c62272", MISTRAL, None, {"name": "mistral-v3", "skip": {"system_history"}}],
    "mistral-v7": ["tests:mistralai/Mistral-Large-Instruct-2411 (mistralai 'v7' template)", "3c4ad5fa60dd8c7ccdf82fa4225864c903e107728fcaf859fa6052cb80c92ee9", MISTRAL, None, {"name": "mistral-v7", "spm": True}],
    # Without a system message it says which day it is.
    "mistral-small": ["file:Mistral-Small-3.2-24B-Instruct-2506", "5b8f31f11198696548d544dbe424a3c1ef244d00a475f4e1bffb351fda085608", MISTRAL, None, {"name": "mistral-v7", "only": S_ONLY}],
    "gemma1": ["tests:google/gemma-7b-it", "3c050259279da4341947d5f012aadc5975af71c235e71ef7e520531aaec17a86", GEMMA, None, {"no_bos": True}],
    "gemma2": ["file:google-gemma-2-2b-it", "ecd6ae513fe103f0eb62e8ab5bfa8d0fe45c1074fa398b089c93a7e70c15cfd6", GEMMA, None, {}],
    "gemma3": ["extra:gemma-3-it", "7de1c58e208eda46e9c7f86397df37ec49883aeece39fb961e0a6b24088dd3c4", GEMMA, None, {"name": "gemma"}],
    # It leaves a system message out, silently; here it is refused.
    "phi3-mini": ["gguf:phi-3", "268b6082ceb7176dc6ed80557a2f7837f9f0339592fbee677d405a553af15f88", PHI3, "phi-3", {"rstrip": True, "skip": S_ONLY}],
    "phi3.5": ["file:microsoft-Phi-3.5-mini-instruct", "78d976a442bcde2f0be15aafbb8e3050e1104f86732266f68403251b89982a90", PHI3, "phi-3", {"name": "phi3", "rstrip": True}],
}


def load_templates(llama_cpp, extra):
    """{where: source}"""
    out = {"file:" + p.stem: p.read_text() for p in (llama_cpp / "models/templates").glob("*.jinja")}
    out |= {"extra:" + p.stem: p.read_text() for p in extra.glob("*.jinja")}
    name = None
    for line in (llama_cpp / "tests/test-chat-template.cpp").read_text().splitlines():
        if m := re.match(r'\s*/\* \.name= \*/ "(.*)",$', line):
            name = m[1]
        elif m := re.match(r'\s*/\* \.template_str= \*/ (".*"),$', line):
            out["tests:" + name] = ast.literal_eval(m[1])
    return out


def load_vocabulary(path):
    """The GGUF's tokenizer fields (the package gguf takes minutes for them)."""
    data = path.read_bytes()
    at = 24
    scalars = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

    def take(kind):
        nonlocal at
        if kind == 8:
            end = at + 8 + struct.unpack_from("<Q", data, at)[0]
            text, at = data[at + 8:end].decode(errors="replace"), end
            return text
        if kind == 9:
            of, count = struct.unpack_from("<IQ", data, at)
            at += 12
            return [take(of) for _ in range(count)]
        (value,) = struct.unpack_from("<" + scalars[kind], data, at)
        at += struct.calcsize(scalars[kind])
        return value

    fields = {}
    for _ in range(struct.unpack_from("<Q", data, 16)[0]):
        key = take(8)
        fields[key.removeprefix("tokenizer.ggml.")] = take(take(4))
    return fields


def make_tokenizer(vocabulary, rstrip):
    """Hugging Face's tokenizer of the vocabulary, as the families publish it."""
    tokens = vocabulary["tokens"]
    kinds = vocabulary["token_type"]
    ids = {t: i for i, t in enumerate(tokens)}
    if vocabulary["model"] == "llama":
        scores = {t: vocabulary["scores"][i] for i, t in enumerate(tokens) if kinds[i] == 1}
        merges = generate_merges({t: ids[t] for t in scores}, scores)
        tokenizer = tokenizers.Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        merges = [tuple(m.split(" ")) for m in vocabulary["merges"]]
        number = {"llama-bpe": r"\p{N}{1,3}", "qwen2": r"\p{N}"}.get(vocabulary["pre"])
        tokenizer = tokenizers.Tokenizer(models.BPE(ids, merges, ignore_merges=vocabulary["pre"] == "llama-bpe"))
        if number:
            pattern = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + number +
                       r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
            steps = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
                     pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
            if vocabulary["pre"] == "qwen2":
                tokenizer.normalizer = normalizers.NFC()
        else:
            assert vocabulary["pre"] == "smollm", vocabulary["pre"]
            steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    strips = rstrip - {"<s>", "<unk>", "<|endoftext|>"}
    tokenizer.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False, rstrip=t in strips)
                                  for i, t in enumerate(tokens) if kinds[i] == 3])
    return tokenizer


def cut(text, bos, control, spm, rstrip):
    """The text after BOS as [["c", token] | ["t", text]]."""
    parts = []
    text = text.removeprefix(bos)
    if spm and bos:
        text = text.removeprefix(" ")
    for piece in re.split("(" + "|".join(map(re.escape, control)) + ")", text):
        after_control = parts and parts[-1][0] == "c"
        if piece in control:
            parts.append(["c", piece])
            continue
        if after_control and spm:
            piece = piece.removeprefix(" ")
        if after_control and rstrip:
            piece = piece.lstrip()
        if piece:
            parts.append(["t", piece])
    return parts


def render(source, messages, ask, bos, eos, kwargs):
    """None where the template refuses the list."""
    chat = [{"role": role, "content": content} for role, content in messages]
    try:
        rendered, _ = render_jinja_template([chat], chat_template=source, add_generation_prompt=ask,
                                            bos_token=bos, eos_token=eos, **kwargs)
    except Exception as error:  # jinja2's own kinds, by raise_exception()
        assert "supported" in str(error) or "alternate" in str(error), error
        return None
    return rendered[0]


BOS = {"chatml": "", "smollm2": "", "llama3": "<|begin_of_text|>", "gemma": "<bos>"}
EOS = {"phi": "<|endoftext|>", "qwen": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<eos>"}


def of_family(table, family, otherwise):
    return next((v for k, v in table.items() if family.startswith(k)), otherwise)


def cases_of(family, source, tokenizer):
    _, _, control, _, more = FAMILIES[family]
    bos = of_family(BOS, family, "" if family.startswith("qwen") else "<s>")
    eos = of_family(EOS, family, "</s>")
    for name, messages in CONVERSATIONS.items():
        if name in more.get("skip", ()) or name not in more.get("only", CONVERSATIONS):
            continue
        for ask in (True, False):
            if ask == (messages[-1][0] == A) or (not ask and more.get("always_asks")):
                continue
            text = render(source, messages, ask, bos, eos, more.get("kwargs", {}))
            if text is None:
                yield {"conversation": name, "asks": ask, "refused": True}
                continue
            # What Phi-3 says at the very end is for training.
            if family.startswith("phi") and not ask:
                text = text.removesuffix(eos)
            case = {"conversation": name, "asks": ask,
                    "parts": cut(text, bos, control, more.get("spm"), more.get("rstrip"))}
            if tokenizer:
                case["ids"] = tokenizer.encode(text.removeprefix(bos), add_special_tokens=False).ids
            yield case


# Apache-2.0 and MIT: their templates may stand here, so that recognition is tested on the originals.
FREE = {"smollm2", "qwen2", "qwen2.5", "qwen3", "mistral-v0", "mistral-v1", "mistral-nemo", "mistral-small", "phi3-mini", "phi3.5"}


def main():
    llama_cpp, extra, out = map(pathlib.Path, sys.argv[1:4])
    sources = load_templates(llama_cpp, extra)
    everything = "--all-sources" in sys.argv
    conversations = {n: [{"role": r, "content": c} for r, c in m] for n, m in CONVERSATIONS.items()}
    by_vocabulary = {}
    made = {}
    for family, (where, sha, control, vocabulary, more) in FAMILIES.items():
        fields = None
        if vocabulary:
            file = extra / "SmolLM2-135M-Instruct.Q4_1.gguf" if vocabulary == "smollm" else llama_cpp / f"models/ggml-vocab-{vocabulary}.gguf"
            fields = load_vocabulary(file)
        source = fields["tokenizer.chat_template"] if where.startswith("gguf:") else sources[where]
        found = hashlib.sha256(source.encode()).hexdigest()
        if found != sha:
            sys.exit(f"{family}: {where} has the SHA-256 {found}, expected {sha}")
        if fields and vocabulary not in made:
            made[vocabulary] = make_tokenizer(fields, set(control) if more.get("rstrip") else set())
        tokenizer = made.get(vocabulary)
        entry = {"family": family, "source_sha256": sha}
        if "name" in more:
            entry["name"] = more["name"]
        if family in FREE or everything:
            entry["jinja"] = source
        for key, file in (("parts", "parts"), ("ids", f"ids-{vocabulary}")):
            cases = [{k: v for k, v in c.items() if k not in {"parts", "ids"} - {key}} for c in cases_of(family, source, tokenizer)]
            cases = [c for c in cases if key in c or (key == "parts" and "refused" in c)]
            if cases and ("name" in entry or "jinja" in entry):
                by_vocabulary.setdefault(file, []).append(entry | {"cases": cases})
    for file, entries in by_vocabulary.items():
        if not file.startswith("parts"):
            # The source where the name alone does not say it all.
            entries = [{k: v for k, v in e.items() if k != "jinja" or "name" not in e} for e in entries]
        lines = ",\n".join(json.dumps({k: v for k, v in e.items() if k != "cases"})[:-1] + ', "cases": [\n' +
                           ",\n".join(json.dumps(c) for c in e["cases"]) + "\n]}" for e in entries)
        if lines:
            (out / f"{file}.json").write_text('{"conversations": ' + json.dumps(conversations) + ',\n"chat_templates": [\n' + lines + "\n]}\n")


if __name__ == "__main__":
    main()
