#include <cmath>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "glog/logging.h"
#include "tests/support/gguf_writer.h"

namespace promptcache::worker {
namespace {

constexpr uint32_t kFirstMerged = 3 + 256;

// How a byte is spelled in a byte-level vocabulary: printable Latin-1 as it
// is, the others from U+0100 on, in order.
std::vector<std::string> ByteSpellings() {
  std::vector<std::string> spellings;
  uint32_t next = 0x100;
  for (uint32_t b = 0; b < 256; ++b) {
    const bool printable = (b >= 0x21 && b <= 0x7E) ||
                           (b >= 0xA1 && b <= 0xAC) || (b >= 0xAE && b <= 0xFF);
    const uint32_t code_point = printable ? b : next++;
    std::string text;
    if (code_point < 0x80) {
      text.push_back(static_cast<char>(code_point));
    } else {
      text.push_back(static_cast<char>(0xC0 | code_point >> 6));
      text.push_back(static_cast<char>(0x80 | (code_point & 0x3F)));
    }
    spellings.push_back(text);
  }
  return spellings;
}

std::vector<std::string> MergedWords() {
  std::vector<std::string> words = {
      " the",  " and",   " of",       " to",     "in",        " is",   " you",
      " that", " it",    " he",       " was",    " for",      " on",   " are",
      " with", " his",   " they",     " at",     " be",       " this", " have",
      " from", " one",   " had",      " by",     " not",      " what", "ing",
      "user",  "system", "assistant", " answer", " question", "er",    "ed",
  };
  for (char a = 'a'; a <= 'z'; ++a) {
    for (char b = 'a'; b <= 'z'; ++b) words.push_back({a, b});
  }
  return words;
}

void SetVocabulary(const TinyLlamaSpec& spec, GgufWriter* writer) {
  CHECK_GE(spec.vocab, kFirstMerged);
  const std::vector<std::string> bytes = ByteSpellings();
  std::vector<std::string> tokens = {"<|endoftext|>", "<|im_start|>",
                                     "<|im_end|>"};
  std::vector<int32_t> types(3, 3);
  tokens.insert(tokens.end(), bytes.begin(), bytes.end());
  std::set<std::string> known(tokens.begin(), tokens.end());
  std::vector<std::string> merges;
  for (const std::string& word : MergedWords()) {
    std::string left = bytes[static_cast<uint8_t>(word[0])];
    for (size_t i = 1; i < word.size(); ++i) {
      const std::string& right = bytes[static_cast<uint8_t>(word[i])];
      const std::string merged = left + right;
      if (tokens.size() < spec.vocab && known.insert(merged).second) {
        merges.push_back(left + " " + right);
        tokens.push_back(merged);
      }
      if (!known.contains(merged)) break;
      left = merged;
    }
  }
  types.resize(tokens.size(), 1);
  while (tokens.size() < spec.vocab) {
    tokens.push_back("<unused_" + std::to_string(tokens.size()) + ">");
    types.push_back(5);
  }
  writer->SetString("tokenizer.ggml.model", "gpt2")
      .SetString("tokenizer.ggml.pre", spec.pre_tokenizer)
      .SetStrings("tokenizer.ggml.tokens", tokens)
      .SetInt32s("tokenizer.ggml.token_type", types)
      .SetStrings("tokenizer.ggml.merges", merges)
      .SetUint32("tokenizer.ggml.bos_token_id", 1)
      .SetUint32("tokenizer.ggml.eos_token_id", 2)
      .SetBool("tokenizer.ggml.add_bos_token", false)
      .SetString("tokenizer.chat_template",
                 "{% for message in messages %}{{'<|im_start|>' + "
                 "message['role'] + '\n' + message['content'] + '<|im_end|>' + "
                 "'\n'}}{% endfor %}{% if add_generation_prompt %}"
                 "{{ '<|im_start|>assistant\n' }}{% endif %}");
}

void SetConfig(const TinyLlamaSpec& spec, GgufWriter* writer) {
  writer->SetString("general.architecture", "llama")
      .SetString("general.name", spec.name)
      .SetUint32("llama.block_count", spec.layers)
      .SetUint32("llama.context_length", spec.context)
      .SetUint32("llama.embedding_length", spec.hidden)
      .SetUint32("llama.feed_forward_length", spec.ffn)
      .SetUint32("llama.attention.head_count", spec.heads)
      .SetUint32("llama.attention.head_count_kv", spec.kv_heads)
      .SetUint32("llama.attention.key_length", spec.head_dim)
      .SetUint32("llama.attention.value_length", spec.head_dim)
      .SetFloat("llama.attention.layer_norm_rms_epsilon", spec.norm_epsilon)
      .SetFloat("llama.rope.freq_base", spec.rope_theta)
      .SetUint32("llama.rope.dimension_count",
                 spec.rope_dims == 0 ? spec.head_dim : spec.rope_dims)
      .SetUint32("llama.vocab_size", spec.vocab);
}

class RandomTensors {
 public:
  RandomTensors(uint64_t seed, GgufWriter* writer)
      : random_(seed), writer_(writer) {}

  // Rows keep the variance of what they multiply, times gain squared.
  void Matrix(const std::string& name, TensorType type, uint64_t rows,
              uint64_t cols, float gain = 1.0f) {
    const float largest = gain * std::sqrt(3.0f / static_cast<float>(cols));
    writer_->AddTensor(name, type, rows, cols,
                       Uniform(rows * cols, -largest, largest));
  }
  void Norm(const std::string& name, uint64_t cols) {
    writer_->AddTensor(name, TensorType::kF32, 1, cols,
                       Uniform(cols, 0.5f, 1.5f));
  }

 private:
  // Not std's distributions, which differ between libraries.
  std::vector<float> Uniform(uint64_t count, float low, float high) {
    std::vector<float> values(count);
    for (float& v : values) {
      v = low + (high - low) * static_cast<float>(random_() >> 40) * 0x1p-24f;
    }
    return values;
  }

  std::mt19937_64 random_;
  GgufWriter* const writer_;
};

}  // namespace

GgufWriter TinyLlama(const TinyLlamaSpec& spec) {
  GgufWriter writer;
  SetConfig(spec, &writer);
  SetVocabulary(spec, &writer);
  RandomTensors tensors(spec.seed, &writer);
  const uint64_t q_dim = uint64_t{spec.heads} * spec.head_dim;
  const uint64_t kv_dim = uint64_t{spec.kv_heads} * spec.head_dim;
  // Logits with a spread of about 3, so that answers have a margin.
  tensors.Matrix("token_embd.weight", spec.embedding_type, spec.vocab,
                 spec.hidden, /*gain=*/3.0f);
  for (uint32_t layer = 0; layer < spec.layers; ++layer) {
    const std::string blk = "blk." + std::to_string(layer) + ".";
    tensors.Norm(blk + "attn_norm.weight", spec.hidden);
    tensors.Matrix(blk + "attn_q.weight", spec.type, q_dim, spec.hidden, 1.5f);
    tensors.Matrix(blk + "attn_k.weight", spec.type, kv_dim, spec.hidden, 1.5f);
    tensors.Matrix(blk + "attn_v.weight", spec.type, kv_dim, spec.hidden);
    tensors.Matrix(blk + "attn_output.weight", spec.type, spec.hidden, q_dim);
    tensors.Norm(blk + "ffn_norm.weight", spec.hidden);
    tensors.Matrix(blk + "ffn_gate.weight", spec.type, spec.ffn, spec.hidden);
    tensors.Matrix(blk + "ffn_up.weight", spec.type, spec.ffn, spec.hidden);
    tensors.Matrix(blk + "ffn_down.weight", spec.type, spec.hidden, spec.ffn);
  }
  tensors.Norm("output_norm.weight", spec.hidden);
  if (!spec.tied_embeddings) {
    tensors.Matrix("output.weight", spec.embedding_type, spec.vocab,
                   spec.hidden, /*gain=*/3.0f);
  }
  return writer;
}

void WriteTinyLlama(const std::string& path, const TinyLlamaSpec& spec) {
  TinyLlama(spec).Write(path);
}

}  // namespace promptcache::worker
