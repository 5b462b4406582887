#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "common/digest.h"

namespace promptcache::worker {

enum class TensorType {
  kF32,
  kF16,
  kBf16,
  kQ8_0,
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kQ2_K,
  kQ3_K,
  kQ4_K,
  kQ5_K,
  kQ6_K,
  kIq4Nl,
};
std::string_view TensorTypeName(TensorType type);

// A matrix [rows, cols] (or a vector: rows = 1) as it lies in the file,
// row-major; quantised types are blocks of elements along a row. Does not own;
// valid while the ModelFile lives. Read it with DequantizeRow, which knows the
// strides.
struct TensorView {
  std::string name;  // the file's own, for messages
  TensorType type = TensorType::kF32;
  uint64_t rows = 0;
  uint64_t cols = 0;
  std::span<const std::byte> data;
  // A part of a fused tensor that does not lie in one piece: runs of `run` rows
  // (of a vector: elements), one every `run_stride`. 0: one piece.
  uint64_t run = 0;
  uint64_t run_stride = 0;
  // A matrix that lies transposed: elements from one column to the next (F32,
  // F16, BF16 only). 0: it does not.
  uint64_t column_stride = 0;
};

// Dequantises row `row` to `out` (cols floats), exactly as the format defines.
// REQUIRES: row < view.rows, out.size() == view.cols.
void DequantizeRow(const TensorView& view, uint64_t row, std::span<float> out);

enum class RopePairing {
  kHalfSplit,    // element i pairs with i + dims/2 (Hugging Face)
  kInterleaved,  // element 2i pairs with 2i + 1 (GGUF's llama)
};

// How a rotation's frequencies are stretched beyond the trained context.
enum class RopeScalingKind {
  kNone,
  kLinear,  // positions divided by `factor`
  kLlama3,  // low frequencies divided, high ones kept, a ramp between
  kYarn,    // the same idea, with an attention factor (arXiv 2309.00071)
  // Depend on the length of the request: refused for reuse.
  kDynamicNtk,
  kLongRope,
};

struct RopeScaling {
  RopeScalingKind kind = RopeScalingKind::kNone;
  float factor = 1;
  uint32_t original_context = 0;
  float low_freq_factor = 1;   // llama3
  float high_freq_factor = 4;  // llama3
  float beta_fast = 32;        // yarn
  float beta_slow = 1;         // yarn
  // yarn, longrope: multiplies cos and sin; 0: the default. YaRN's is
  // 0.1 ln(factor) + 1.
  float attention_factor = 0;
  // One per frequency, dims / 2 of them, by which it is divided. llama3: when
  // not empty they stand for the formula (GGUF files hold them computed).
  // longrope: those of requests within original_context.
  std::vector<float> divisors;
  std::vector<float> long_divisors;  // longrope, of longer requests
};

struct RopeConfig {
  float theta = 10000.0f;
  uint32_t dims = 0;  // rotated elements of a head; the rest is left alone
  RopePairing pairing = RopePairing::kHalfSplit;
  RopeScaling scaling;
};

// Where a token's position enters.
enum class PositionKind {
  kRope,
  kAlibi,    // a bias on the scores: slope of the head times the distance
  kLearned,  // a table added at the embedding: modules cannot move
  // A learned bias on the scores by bucket of the distance (T5). Only of
  // encoder-decoders here.
  kRelative,
};
enum class NormKind { kRms, kLayer };
enum class Activation {
  kSilu,
  kGelu,      // by erf
  kGeluTanh,  // its tanh approximation
  kRelu,
};
enum class ResidualKind {
  kSequential,  // x += attention(norm(x)); x += ffn(norm'(x))
  kParallel,    // x += attention(norm(x)) + ffn(norm'(x)); norm' may be norm
};

struct ModelConfig {
  std::string architecture;  // "llama", "qwen2", "falcon", ...
  std::string name;
  uint32_t num_layers = 0;
  uint32_t hidden_dim = 0;
  uint32_t num_heads = 0;
  uint32_t num_kv_heads = 0;
  uint32_t head_dim = 0;
  uint32_t ffn_dim = 0;
  uint32_t vocab_size = 0;
  uint32_t context_length = 0;
  float norm_epsilon = 1e-5f;
  RopeConfig rope;
  bool tied_embeddings = false;

  PositionKind positions = PositionKind::kRope;
  // Learned positions: row of the table for position 0 (OPT: 2).
  uint32_t position_table_offset = 0;
  // ALiBi: 2^(-alibi_max_bias * i / n) slopes (MPT section 3.1,
  // alibi_bias_max), and whether the bias is added before the division by
  // sqrt(head_dim) (Falcon) or after it (MPT).
  float alibi_max_bias = 8;
  bool alibi_before_scale = false;
  NormKind norm = NormKind::kRms;
  // Added to a norm's weight (Gemma: 1).
  float norm_weight_offset = 0;
  Activation activation = Activation::kSilu;
  // ffn = down(act(gate) * up) when true, down(act(up)) when false.
  bool gated_ffn = true;
  ResidualKind residual = ResidualKind::kSequential;
  // Parallel only: one norm feeds both attention and feed-forward.
  bool shared_parallel_norm = false;
  // An RMS norm over each head of q and k before the rotation (Qwen 3, Gemma
  // 3).
  bool qk_norm = false;
  // Norms on the outputs of attention and feed-forward (Gemma 3).
  bool post_norms = false;
  float embedding_scale = 1;  // Gemma: sqrt(hidden_dim)
  float attention_scale = 0;  // 0: 1 / sqrt(head_dim)
  // Per layer: tokens that a token sees, itself included, in plan order; 0:
  // all. Empty: all layers 0.
  std::vector<uint32_t> layer_windows;
  // Per layer with a window: the base of its rotation, unscaled (Gemma 3's
  // local layers). 0: rope.theta everywhere.
  float local_rope_theta = 0;

  // Encoder-decoder models (T5): the encoder's layers; 0: there is no encoder.
  // num_layers are the decoder's, which attend to their own tokens and to the
  // encoder's output; all dimensions are of both.
  uint32_t encoder_layers = 0;
  int32_t decoder_start_token = 0;  // what the decoder begins with
  // Relative positions: buckets of distances, the last of them from
  // relative_max_distance on (arXiv 1910.10683).
  uint32_t relative_buckets = 0;
  uint32_t relative_max_distance = 0;
  // Multiplies what the output matrix is given.
  float output_scale = 1;

  bool is_encoder_decoder() const { return encoder_layers > 0; }
};

// Which tensor of a layer (or, layer-less, of the model). A file's fused
// tensors are handed out in parts, so that every role is its own matrix. Norms'
// and matrices' biases are vectors; absent ones are NotFound.
enum class TensorRole {
  kTokenEmbedding,     // [vocab, hidden]
  kPositionEmbedding,  // [positions, hidden]
  kOutputNorm,         // [hidden]
  kOutput,             // [vocab, hidden]; absent when embeddings are tied
  kAttentionNorm,      // [hidden]
  kQuery,              // [num_heads * head_dim, hidden]
  kKey,                // [num_kv_heads * head_dim, hidden]
  kValue,              // [num_kv_heads * head_dim, hidden]
  kAttentionOut,       // [hidden, num_heads * head_dim]
  kFfnNorm,            // [hidden]
  kFfnGate,            // [ffn, hidden]
  kFfnUp,              // [ffn, hidden]
  kFfnDown,            // [hidden, ffn]
  kQueryNorm,          // [head_dim]
  kKeyNorm,            // [head_dim]
  kPostAttentionNorm,  // [hidden]
  kPostFfnNorm,        // [hidden]
  kOutputNormBias,     // and so on: the bias of the role named
  kOutputBias,
  kAttentionNormBias,
  kQueryBias,
  kKeyBias,
  kValueBias,
  kAttentionOutBias,
  kFfnNormBias,
  kFfnUpBias,
  kFfnDownBias,
  // Encoder-decoders. The roles above are the decoder's; attention and norm of
  // its attention to the encoder's output:
  kCrossNorm,     // [hidden]
  kCrossQuery,    // as kQuery, and so on
  kCrossKey,      // of the encoder's output
  kCrossValue,    // likewise
  kCrossOut,      //
  kRelativeBias,  // [relative_buckets, num_heads], for all layers
  // The encoder's own layers.
  kEncoderOutputNorm,
  kEncoderRelativeBias,
  kEncoderAttentionNorm,
  kEncoderQuery,
  kEncoderKey,
  kEncoderValue,
  kEncoderAttentionOut,
  kEncoderFfnNorm,
  kEncoderFfnGate,
  kEncoderFfnUp,
  kEncoderFfnDown,
};
// Whether a layer of this role is one of encoder_layers.
bool IsEncoderRole(TensorRole role);

// What the tokenizer needs of a file, as the file says it.
struct VocabularyData {
  // "gpt2": byte-level BPE; "llama": SentencePiece's BPE; "t5": its Unigram.
  std::string model;
  // "gpt2": "smollm", "gpt-2", ..., or steps (pre_tokenizer.h); "llama":
  // "metaspace" adds no space in front of one; "t5": tokenizer.json's steps
  // (unigram_normalizer.h), or SentencePiece's own way.
  std::string pre_tokenizer;
  std::vector<std::string> tokens;
  std::vector<int32_t> token_types;  // GGUF's: 1 normal, 2 unknown, 3 control,
                                     // 4 user defined, 6 byte
  std::vector<std::string> merges;   // "left right"
  std::vector<float> scores;
  bool add_space_prefix = true;  // "llama", "t5": U+2581 in front of any text
  // "t5": SentencePiece's compiled table of what characters become, and whether
  // only one of several spaces stays, and none at the ends.
  std::string charsmap;
  bool removes_extra_spaces = false;
  int32_t bos_id = -1;
  int32_t eos_id = -1;
  int32_t eot_id = -1;
  bool add_bos = false;
  // What the tokenizer puts after a text: of use to encoders only. -1: nothing.
  int32_t text_end_id = -1;
  // Folders: all tokens that end a generation, as the configuration lists them.
  std::vector<int32_t> end_ids;
};

// An opened, validated model file; weights stay mapped. Immutable and
// thread-safe. A damaged, truncated or unsupported file is an InvalidArgument
// that names the tensor or field; nothing outside the file is ever read.
class ModelFile {
 public:
  virtual ~ModelFile() = default;

  virtual const ModelConfig& config() const = 0;
  virtual const VocabularyData& vocabulary() const = 0;
  // Jinja source, or "" when the file has none.
  virtual const std::string& chat_template() const = 0;
  virtual const std::string& path() const = 0;
  // Hugging Face folders: tokenizer.json and tokenizer_config.json as they are;
  // "" for what is not there. Such a file's vocabulary() has no tokens.
  virtual const std::string& tokenizer_json() const { return NoText(); }
  virtual const std::string& tokenizer_config_json() const { return NoText(); }
  // `layer` is ignored for the model's own tensors. NotFound, with the name
  // looked for, when the file lacks it.
  virtual absl::StatusOr<TensorView> Tensor(TensorRole role,
                                            uint32_t layer) const = 0;
  // Digest of all tensors, the architecture and the RoPE geometry: the model's
  // part of module keys but for the numerics. Kept in a cache directory by
  // path, size and time, so that a start does not hash gigabytes.
  virtual absl::StatusOr<Digest> Fingerprint() const = 0;

 private:
  static const std::string& NoText() {
    static const std::string text;
    return text;
  }
};

struct OpenOptions {
  // Where fingerprints are kept; "": not kept.
  std::string fingerprint_cache_dir;
  // Accept a file without tensors (for tokenizers).
  bool vocabulary_only = false;
};

// Opens a GGUF file or a Hugging Face folder (config.json and safetensors).
absl::StatusOr<std::unique_ptr<ModelFile>> OpenModelFile(
    const std::string& path, const OpenOptions& options);

}  // namespace promptcache::worker
