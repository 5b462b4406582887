#!/usr/bin/env python3
"""Makes tests/data/tokenizer/unigram-*: small Unigram vocabularies that others trained, and what they make of texts.

    pip install sentencepiece==0.2.3 tokenizers==0.23.3 gguf==0.19.0      (not for the product)
    tools/make_unigram_vectors.py tests/data/tokenizer

* unigram-t5: by SentencePiece, laid out as T5's (</s> 1, <unk> 2), a table of normalisation of its own (the usual NFKC takes 240 KB),
  as a GGUF file; vectors.jsonl by SentencePiece.
* unigram-bytes: by SentencePiece, with byte fallback, spaces kept, pieces that reach over words, a piece of the user's; the same.
* unigram-hf: the first as tokenizer.json, as transformers converts T5's; vectors.jsonl by tokenizers. unigram-hf-trained: the same by
  tokenizers' own trainer.
With a second folder: the same with SentencePiece's own tables (nmt_nfkc) and 20,000 random texts there, to check and not to keep.
"""

import io
import json
import pathlib
import random
import sys
import unicodedata

import gguf
import sentencepiece
import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

ROOT = pathlib.Path(__file__).resolve().parent.parent
MARK = "\u2581"
OTHER_TEXT = """Der Z\u00e4hler im Stra\u00dfenverkehr z\u00e4hlt Fahrr\u00e4der; les \u00e9l\u00e8ves fran\u00e7ais ont d\u00e9j\u00e0 mang\u00e9.
\u00bfD\u00f3nde est\u00e1 la estaci\u00f3n? \u041a\u044d\u0448 \u0445\u0440\u0430\u043d\u0438\u0442 \u043a\u043b\u044e\u0447\u0438 \u0438 \u0437\u043d\u0430\u0447\u0435\u043d\u0438\u044f.
The cache keeps keys and values. A cached module is read where it lies; what is new is computed.
x = 1; y = 22; z = 333; print(f"{x} {y} {z}")  # 4444 55555
"""
TEXTS = [
    "", " ", "  ", "\n", "a", " a", "a ", "  a  b   c  ", "\ta\nb\r\nc\u00a0d\u3000e", "The licence is the Licence.", "cache", "caches cached caching",
    "Licensor shall mean the copyright owner", "1 22 333 4444 55555", "don't can't won't", "e\u0301l\u00e8ve \u00e9l\u00e8ve", "\ufb01ne o\ufb00er \uff21\uff22\uff23 \uff11\uff12",
    "Stra\u00dfe stra\u1e9ee", "\u4f60\u597d\uff0c\u4e16\u754c", "a\u4f60b\u597dc", "\u4f60 \u597d", "\U0001f469\u200d\U0001f4bb\U0001f469", "\u041a\u044d\u0448 \u0437\u043d\u0430\u0447\u0435\u043d\u0438\u044f",
    MARK, MARK + "a", "a" + MARK, "a" + MARK + MARK + "b", MARK + " a", "</s>", "<unk> <pad>", "<0x41><0xC3>", "<sep>", "a<sep>b", "a <sep> b", "<sep><sep> ",
    "\u200b\u00ad", "\u00a8 a", "\u2026 \u00bd \u2122", "a\u0000b", "\ufffd", "\x01\x02", "x = 1;\n  y = 2;\n", "http://www.apache.org/licenses/", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "\u1e9b\u0323", "\u0e04\u0e33", "\uac00\u1100\u1161", "A\u030a \u212b \u00c5", "   \u3000 \t leading and trailing \u2003 ",
]
BYTES = ["ff", "61ff62", "e4bda0e4bd", "20f09f9820", "c3a9c3"]
LONG = [("a", 1000), ("ab ", 500), ("\u4f60", 300), (" ", 400), ("the ", 300), ("a", 1 << 20)]
# What characters become: code points in hexadecimal, as SentencePiece's tables are written.
RULES = {
    "\u00a0": " ", "\u3000": " ", "\t": " ", "\n": " ", "\r": " ", "\u2003": " ", "\ufb01": "fi", "\ufb00": "ff", "\uff21": "A", "\uff22": "B", "\uff23": "C", "\uff11": "1",
    "\uff12": "2", "e\u0301": "\u00e9", "\u2026": "...", "\u00a8": " \u0308", "\u200b": "", "\u00ad": "", "\x01": "", "\x02": "", "\uff0c": ",", "A\u030a": "\u00c5", "\u212b": "\u00c5", "\u2122": "TM",
}


def corpus():
    return [line for line in (ROOT / "LICENSE").read_text().splitlines() + OTHER_TEXT.splitlines() * 4 if line.strip()]


def rules_file(folder):
    code = lambda text: " ".join(f"{ord(c):X}" for c in text)
    path = folder / "rules.tsv"
    path.write_text("".join(f"{code(k)}\t{code(v)}\n" for k, v in RULES.items()))
    return str(path)


def train(vocab_size, **options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(corpus()), model_writer=model, model_type="unigram", vocab_size=vocab_size,
                                             pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2, num_threads=1, **options)
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(model.getvalue())
    return proto


def write_gguf(proto, path):
    writer = gguf.GGUFWriter(path, "t5")
    writer.add_name(path.parent.name)
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([p.piece.encode() for p in proto.pieces])
    writer.add_token_scores([p.score for p in proto.pieces])
    writer.add_token_types([p.type for p in proto.pieces])  # the same numbers
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_space_prefix(proto.normalizer_spec.add_dummy_prefix)
    writer.add_remove_extra_whitespaces(proto.normalizer_spec.remove_extra_whitespaces)
    writer.add_precompiled_charsmap(proto.normalizer_spec.precompiled_charsmap)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def runs(ids):
    out = []
    for i in ids:
        if out and out[-1][0] == i:
            out[-1][1] += 1
        else:
            out.append([i, 1])
    return out


def random_texts(count):
    rng = random.Random(4)
    alphabet = list("abcdeilnorst  ,.'ABT12") + [MARK, "\u00e9", "\u0301", "\u4f60", "\ufb01", "\u00a0", "\u0437", "\n", "<sep>", "the", " cache", "License"]
    return ["".join(rng.choices(alphabet, k=rng.randrange(1, 40))) for _ in range(count)]


def any_texts(count):
    rng = random.Random(5)
    ranges = [(0x20, 0x7F)] * 6 + [(0xA0, 0x250), (0x300, 0x370), (0x400, 0x500), (0x1100, 0x1200), (0x2000, 0x2070), (0x2100, 0x2200), (0x3000, 0x3100),
                                   (0x4E00, 0x5000), (0xAC00, 0xAD00), (0xF900, 0xFB10), (0xFF00, 0xFFF0), (0x1F300, 0x1F600)]
    pick = lambda: chr(rng.randrange(*rng.choice(ranges)))
    texts = ["".join(pick() for _ in range(rng.randrange(1, 30))) for _ in range(count)]
    return [t for t in texts if all(unicodedata.category(c) != "Cn" for c in t)]


def vectors(encode, path, texts, repeats):
    with open(path, "w", encoding="ascii") as out:
        for text in texts:
            out.write(json.dumps({"text": text, "ids": encode(text)}) + "\n")
        for unit, count in repeats:
            out.write(json.dumps({"repeat": [unit, count], "ids_rle": runs(encode(unit * count))}) + "\n")
        for hexadecimal in BYTES:
            text = bytes.fromhex(hexadecimal).decode(errors="replace")
            out.write(json.dumps({"bytes_hex": hexadecimal, "ids": encode(text)}) + "\n")


def by_sentencepiece(proto, folder, texts, repeats):
    folder.mkdir(parents=True, exist_ok=True)
    write_gguf(proto, folder / "vocabulary.gguf")
    processor = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    vectors(lambda text: processor.encode(text), folder / "vectors.jsonl", texts, repeats)


def hf_tokenizer(model, charsmap):
    tokenizer = tokenizers.Tokenizer(model)
    steps = [normalizers.Precompiled(charsmap), normalizers.Strip(left=False, right=True),
             normalizers.Replace(tokenizers.Regex(" {2,}"), MARK)]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=MARK, prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(replacement=MARK, prepend_scheme="always")
    return tokenizer


def by_tokenizers(tokenizer, folder, texts, repeats):
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.encode_special_tokens = True  # text never becomes one of them
    (folder / "config.json").write_text(json.dumps({"model_type": "t5", "vocab_size": tokenizer.get_vocab_size()}) + "\n")
    (folder / "tokenizer.json").write_text(json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=True, separators=(",", ":")) + "\n")
    # Where it takes a special token's name for a piece.
    texts = [t for t in texts if not any(name in t for name in ("</s>", "<unk>", "<pad>"))]
    vectors(lambda text: tokenizer.encode(text, add_special_tokens=False).ids, folder / "vectors.jsonl", texts, repeats)


def make(folder, options, texts):
    t5 = train(400, **options)
    by_sentencepiece(t5, folder / "unigram-t5", texts, LONG[:-1])
    spread = train(700, byte_fallback=True, remove_extra_whitespaces=False, split_by_whitespace=False, user_defined_symbols=["<sep>"], **options)
    by_sentencepiece(spread, folder / "unigram-bytes", texts, LONG[:-1])
    charsmap = t5.normalizer_spec.precompiled_charsmap
    special = [tokenizers.AddedToken(t, special=True, normalized=False) for t in ("<pad>", "</s>", "<unk>")]
    pieces = [(p.piece, p.score) for p in t5.pieces]
    converted = hf_tokenizer(models.Unigram(pieces, 2, False), charsmap)
    converted.add_special_tokens(special)
    converted.post_processor = processors.TemplateProcessing(single=["$A", "</s>"], pair=["$A", "</s>", "$B", "</s>"],
                                                             special_tokens=[("</s>", 1)])
    by_tokenizers(converted, folder / "unigram-hf", texts, LONG)
    trained = hf_tokenizer(models.Unigram(), charsmap)
    trained.train_from_iterator(corpus(), trainers.UnigramTrainer(vocab_size=300, special_tokens=special, unk_token="<unk>", show_progress=False))
    by_tokenizers(trained, folder / "unigram-hf-trained", texts, LONG)


def main():
    folder = pathlib.Path(sys.argv[1])
    scratch = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else None
    rules = rules_file(scratch or pathlib.Path("/tmp"))
    texts = TEXTS + random_texts(40)
    make(folder, {"normalization_rule_tsv": rules}, texts)
    if scratch:
        many = TEXTS + random_texts(2000) + any_texts(20000)
        make(scratch, {"normalization_rule_name": "nmt_nfkc"}, many)


if __name__ == "__main__":
    main()
