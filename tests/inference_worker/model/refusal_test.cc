// What a model file may not hold, and that the error says where and what.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "inference_worker/model/model_file.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_files.h"

namespace promptcache::worker {
namespace {

using ::testing::HasSubstr;

struct Refusal {
  const char* name;
  std::function<void(GgufWriter*)> damage;
  const char* message;
};

std::ostream& operator<<(std::ostream& out, const Refusal& refusal) {
  return out << refusal.name;
}

std::string Bytes(std::initializer_list<uint64_t> numbers) {
  std::string bytes;
  for (const uint64_t n : numbers) {
    bytes.append(reinterpret_cast<const char*>(&n), sizeof(n));
  }
  return bytes;
}

class RefusalTest : public ::testing::TestWithParam<Refusal> {};

TEST_P(RefusalTest, NamesTheFieldAndTheNumbers) {
  const TempDir dir;
  const std::string path = dir.path() + "/model.gguf";
  GgufWriter writer = TinyLlama({.layers = 1, .tied_embeddings = false});
  GetParam().damage(&writer);
  writer.Write(path);
  const auto model = OpenModelFile(path, {});
  EXPECT_THAT(model, StatusIs(absl::StatusCode::kInvalidArgument,
                              HasSubstr(GetParam().message)));
  EXPECT_THAT(model,
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(path)));
}

const std::vector<Refusal>& MetadataRefusals() {
  static const auto* const kCases = new std::vector<Refusal>{
      {"Architecture",
       [](GgufWriter* w) { w->SetString("general.architecture", "mamba"); },
       "metadata general.architecture: \"mamba\" is not supported; supported: "
       "llama"},
      {"NoArchitecture",
       [](GgufWriter* w) { w->Remove("general.architecture"); },
       "metadata general.architecture is missing"},
      {"NoLayers", [](GgufWriter* w) { w->Remove("llama.block_count"); },
       "metadata llama.block_count is missing"},
      {"ZeroLayers",
       [](GgufWriter* w) { w->SetUint32("llama.block_count", 0); },
       "metadata llama.block_count: 0 is not from 1 to"},
      {"TextForANumber",
       [](GgufWriter* w) { w->SetString("llama.context_length", "long"); },
       "metadata llama.context_length: \"long\" is not an unsigned 32-bit"},
      {"NumberForText",
       [](GgufWriter* w) { w->SetUint32("general.architecture", 5); },
       "metadata general.architecture: 5 is not a string"},
      {"NumberTooLarge",
       [](GgufWriter* w) {
         w->SetRaw("llama.context_length", 10, Bytes({uint64_t{1} << 32}));
       },
       "metadata llama.context_length: 4294967296 is not an unsigned 32-bit"},
      {"HeadsPerLayer",
       [](GgufWriter* w) {
         w->SetInt32s("llama.attention.head_count_kv", {2, 2});
       },
       "metadata llama.attention.head_count_kv: array of 2 int32 is not"},
      {"HeadsNotAMultiple",
       [](GgufWriter* w) { w->SetUint32("llama.attention.head_count_kv", 3); },
       "metadata llama.attention.head_count: 4 is not a multiple of the 3"},
      {"ValueLength",
       [](GgufWriter* w) { w->SetUint32("llama.attention.value_length", 8); },
       "metadata llama.attention.value_length: 8 is not the length of keys"},
      {"OddRope",
       [](GgufWriter* w) { w->SetUint32("llama.rope.dimension_count", 15); },
       "metadata llama.rope.dimension_count: 15 is not even"},
      {"LongRope",
       [](GgufWriter* w) { w->SetUint32("llama.rope.dimension_count", 18); },
       "metadata llama.rope.dimension_count: 18 is not even or exceeds the "
       "head's 16"},
      {"NegativeTheta",
       [](GgufWriter* w) { w->SetFloat("llama.rope.freq_base", -1); },
       "metadata llama.rope.freq_base: -1 is not a positive number"},
      {"RopeScaling",
       [](GgufWriter* w) { w->SetString("llama.rope.scaling.type", "ntk"); },
       "metadata llama.rope.scaling.type: \"ntk\" is not supported; supported: "
       "none, linear, yarn"},
      {"RopeFactor",
       [](GgufWriter* w) { w->SetFloat("llama.rope.scaling.factor", 4); },
       "metadata llama.rope.scaling.factor: 4 is not supported"},
      {"SlidingWindow",
       [](GgufWriter* w) {
         w->SetUint32("llama.attention.sliding_window", 4096);
       },
       "metadata llama.attention.sliding_window: 4096 is not supported"},
      {"Experts", [](GgufWriter* w) { w->SetUint32("llama.expert_count", 8); },
       "metadata llama.expert_count: 8 is not supported"},
      {"SomethingNew",
       [](GgufWriter* w) { w->SetString("llama.attention.kind", "linear"); },
       "metadata llama.attention.kind: \"linear\" is not supported"},
      {"NotCausal",
       [](GgufWriter* w) { w->SetBool("llama.attention.causal", false); },
       "metadata llama.attention.causal: false is not supported"},
      {"InParts", [](GgufWriter* w) { w->SetUint32("split.count", 3); },
       "metadata split.count: 3 is not supported"},
      {"OldQuantization",
       [](GgufWriter* w) { w->SetUint32("general.quantization_version", 1); },
       "metadata general.quantization_version: 1 is not supported"},
      {"KeyTwice", [](GgufWriter* w) { w->RepeatKey("general.name"); },
       "metadata \"general.name\": the key occurs twice"},
      {"EmptyKey", [](GgufWriter* w) { w->SetUint32("", 1); },
       "0 bytes long; a name has 1 to 65535"},
      {"UnknownValueType", [](GgufWriter* w) { w->SetRaw("k", 13, ""); },
       "metadata \"k\": unknown value type 13"},
      {"BoolOfTwo", [](GgufWriter* w) { w->SetRaw("k", 7, "\2"); },
       "metadata \"k\": 2 is not a bool"},
      {"Alignment",
       [](GgufWriter* w) { w->SetUint32("general.alignment", 24); },
       "metadata general.alignment: 24 is not a power of two"},
      {"VocabSize", [](GgufWriter* w) { w->SetUint32("llama.vocab_size", 7); },
       "metadata llama.vocab_size: 7 is not the number of the embedding's "
       "rows, 320"},
      {"TokenTypes",
       [](GgufWriter* w) { w->SetInt32s("tokenizer.ggml.token_type", {1}); },
       "metadata tokenizer.ggml.token_type: 1 entries for 320 tokens"},
      {"EosOutOfRange",
       [](GgufWriter* w) { w->SetUint32("tokenizer.ggml.eos_token_id", 320); },
       "metadata tokenizer.ggml.eos_token_id: 320 is not a token"},
      {"TokensThatAreNumbers",
       [](GgufWriter* w) { w->SetInt32s("tokenizer.ggml.tokens", {1, 2}); },
       "metadata tokenizer.ggml.tokens: array of 2 int32 is not an array of "
       "strings"},
  };
  return *kCases;
}

const std::vector<Refusal>& TensorRefusals() {
  static const auto* const kCases = new std::vector<Refusal>{
      {"Missing", [](GgufWriter* w) { w->RemoveTensor("blk.0.attn_k.weight"); },
       "tensor \"blk.0.attn_k.weight\" is missing"},
      {"MissingEmbedding",
       [](GgufWriter* w) { w->RemoveTensor("token_embd.weight"); },
       "tensor \"token_embd.weight\" is missing"},
      {"Twice",
       [](GgufWriter* w) {
         const GgufWriter::Tensor t = w->tensor("output_norm.weight");
         w->AddRawTensor(t.name, t.dims, t.type, t.bytes);
       },
       "tensor \"output_norm.weight\": the name occurs twice"},
      {"Unknown",
       [](GgufWriter* w) {
         w->AddTensor("blk.0.attn_q.bias", TensorType::kF32, 1, 64,
                      std::vector<float>(64));
       },
       "tensor \"blk.0.attn_q.bias\" is not one of a 1-layer llama model"},
      {"MoreLayers",
       [](GgufWriter* w) {
         w->AddTensor("blk.1.attn_norm.weight", TensorType::kF32, 1, 64,
                      std::vector<float>(64));
       },
       "tensor \"blk.1.attn_norm.weight\" is not one of a 1-layer"},
      {"Type",
       [](GgufWriter* w) { w->tensor("blk.0.ffn_up.weight").type = 23; },
       "tensor \"blk.0.ffn_up.weight\": type IQ4_XS (23) is not supported; "
       "supported: F32, F16, BF16, Q8_0, Q4_0, Q4_1"},
      {"UnknownType",
       [](GgufWriter* w) { w->tensor("blk.0.ffn_up.weight").type = 999; },
       "tensor \"blk.0.ffn_up.weight\": type unknown (999)"},
      {"Shape",
       [](GgufWriter* w) { w->tensor("blk.0.attn_k.weight").dims = {64, 64}; },
       "tensor \"blk.0.attn_k.weight\": shape [64, 64] is not [32, 64]"},
      {"ThreeDimensions",
       [](GgufWriter* w) {
         w->tensor("blk.0.attn_k.weight").dims = {64, 32, 2};
       },
       "tensor \"blk.0.attn_k.weight\": shape [2, 32, 64] is not [32, 64]"},
      {"NoDimensions",
       [](GgufWriter* w) { w->tensor("blk.0.attn_k.weight").dims = {}; },
       "tensor \"blk.0.attn_k.weight\": 0 dimensions"},
      {"FiveDimensions",
       [](GgufWriter* w) {
         w->tensor("blk.0.attn_k.weight").dims = {64, 32, 1, 1, 1};
       },
       "tensor \"blk.0.attn_k.weight\": 5 dimensions"},
      {"EmptyDimension",
       [](GgufWriter* w) { w->tensor("blk.0.attn_k.weight").dims = {64, 0}; },
       "tensor \"blk.0.attn_k.weight\": dimension 1 is 0"},
      {"Overflow",
       [](GgufWriter* w) {
         w->tensor("blk.0.attn_k.weight").dims = {uint64_t{1} << 40,
                                                  uint64_t{1} << 40};
       },
       "tensor \"blk.0.attn_k.weight\": dimension 1 is 1099511627776, which is "
       "empty or overflows"},
      {"Misaligned",
       [](GgufWriter* w) { w->tensor("blk.0.attn_k.weight").offset = 33; },
       "tensor \"blk.0.attn_k.weight\": offset 33 is not a multiple of the "
       "alignment 32"},
      {"Outside",
       [](GgufWriter* w) { w->tensor("blk.0.attn_k.weight").offset = 1 << 30; },
       "tensor \"blk.0.attn_k.weight\": offset 1073741824 + 4096 exceeds the "
       "file's"},
      {"OffsetThatWraps",
       [](GgufWriter* w) {
         w->tensor("blk.0.attn_k.weight").offset = INT64_MAX - 31;
       },
       "tensor \"blk.0.attn_k.weight\": offset 9223372036854775776 + 4096"},
      {"Overlap",
       [](GgufWriter* w) { w->tensor("blk.0.attn_k.weight").offset = 0; },
       "its data overlaps that of"},
      {"LongName",
       [](GgufWriter* w) {
         w->tensor("output_norm.weight").name = std::string(65, 'n');
       },
       "65 bytes long; a name has 1 to 64"},
  };
  return *kCases;
}

const auto kName = [](const auto& param_info) {
  return std::string(param_info.param.name);
};
INSTANTIATE_TEST_SUITE_P(Metadata, RefusalTest,
                         ::testing::ValuesIn(MetadataRefusals()), kName);
INSTANTIATE_TEST_SUITE_P(Tensors, RefusalTest,
                         ::testing::ValuesIn(TensorRefusals()), kName);

TEST(RefusalOfTypesTest, QuantisedRowsAreWholeBlocks) {
  const TempDir dir;
  const std::string path = dir.path() + "/model.gguf";
  GgufWriter writer = TinyLlama({.layers = 1, .hidden = 48, .ffn = 32});
  writer.tensor("blk.0.ffn_up.weight").type = 8;
  writer.Write(path);
  EXPECT_THAT(
      OpenModelFile(path, {}),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("tensor \"blk.0.ffn_up.weight\": rows of 48 elements "
                         "are not whole blocks of 32, which type Q8_0 needs")));
}

TEST(RefusalOfFilesTest, SaysWhatTheFileIs) {
  const TempDir dir;
  EXPECT_THAT(OpenModelFile(dir.path() + "/none.gguf", {}),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("none.gguf")));
  EXPECT_THAT(OpenModelFile(dir.path(), {}),
              StatusIs(absl::StatusCode::kNotFound,
                       HasSubstr("the folder has no config.json")));
  const auto open_bytes = [&dir](const std::string& bytes) {
    const std::string path = dir.path() + "/bytes.gguf";
    WriteFileOrDie(path, bytes);
    return OpenModelFile(path, {}).status();
  };
  EXPECT_THAT(open_bytes(""), StatusIs(absl::StatusCode::kInvalidArgument,
                                       HasSubstr("the file is empty")));
  EXPECT_THAT(open_bytes("PK\3\4 and more"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("not a GGUF file")));
  EXPECT_THAT(open_bytes(GgufWriter(/*version=*/1).Serialize()),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("version: 1 is not supported: 2 and 3 are")));
  EXPECT_THAT(open_bytes(GgufWriter(/*version=*/0x03000000).Serialize()),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("a big-endian file")));
}

}  // namespace
}  // namespace promptcache::worker
