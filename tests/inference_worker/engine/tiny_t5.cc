#include "tests/inference_worker/engine/tiny_t5.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "common/status_macros.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_files.h"

namespace promptcache::worker {
namespace {

using Json = nlohmann::json;

struct Tensor {
  std::vector<size_t> shape;
  std::vector<uint16_t> values;  // bf16
};
using Tensors = std::map<std::string, Tensor>;

std::string FolderOfTinyT5() { return TestDataPath("models/later/tiny-t5"); }

Tensors ReadTensors(const std::string& path) {
  const std::string bytes = ReadFileOrDie(path);
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data(), 8);
  Tensors tensors;
  const Json header = Json::parse(bytes.substr(8, header_bytes));
  for (const auto& [name, info] : header.items()) {
    if (name == "__metadata__") continue;
    Tensor& tensor = tensors[name];
    info["shape"].get_to(tensor.shape);
    const size_t begin = info["data_offsets"][0];
    const size_t end = info["data_offsets"][1];
    tensor.values.resize((end - begin) / 2);
    std::memcpy(tensor.values.data(), bytes.data() + 8 + header_bytes + begin,
                end - begin);
  }
  return tensors;
}

void WriteTensors(const std::string& path, const Tensors& tensors) {
  Json header;
  std::string data;
  for (const auto& [name, tensor] : tensors) {
    const size_t begin = data.size();
    data.append(reinterpret_cast<const char*>(tensor.values.data()),
                tensor.values.size() * 2);
    header[name] = {{"dtype", "BF16"},
                    {"shape", tensor.shape},
                    {"data_offsets", {begin, data.size()}}};
  }
  const std::string text = header.dump();
  const uint64_t header_bytes = text.size();
  std::string file(8, '\0');
  std::memcpy(file.data(), &header_bytes, 8);
  WriteFileOrDie(path, file + text + data);
}

// The first rows and columns of a matrix.
Tensor Corner(const Tensor& whole, size_t rows, size_t cols) {
  Tensor corner = {{rows, cols}, {}};
  for (size_t row = 0; row < rows; ++row) {
    const auto at =
        whole.values.begin() + static_cast<ptrdiff_t>(row * whole.shape[1]);
    corner.values.insert(corner.values.end(), at,
                         at + static_cast<ptrdiff_t>(cols));
  }
  return corner;
}

// The same matrix from its middle row on: other values of the same size.
Tensor Turned(const Tensor& matrix) {
  Tensor turned = matrix;
  std::rotate(
      turned.values.begin(),
      turned.values.begin() + static_cast<ptrdiff_t>(turned.values.size() / 2),
      turned.values.end());
  return turned;
}

Tensors GatedTensors(const Tensors& plain) {
  constexpr size_t kHeads = 3;
  constexpr size_t kInner = kHeads * 16;
  Tensors gated;
  for (const auto& [name, tensor] : plain) {
    if (name.starts_with("decoder.block.1.")) continue;
    const bool attention = name.find("Attention.") != std::string::npos;
    if (name.ends_with("relative_attention_bias.weight")) {
      gated[name] = Corner(tensor, tensor.shape[0], kHeads);
    } else if (attention && name.ends_with(".o.weight")) {
      gated[name] = Corner(tensor, tensor.shape[0], kInner);
    } else if (attention) {
      gated[name] = Corner(tensor, kInner, tensor.shape[1]);
    } else if (name.ends_with(".wi.weight")) {
      const std::string prefix =
          name.substr(0, name.size() - std::strlen(".weight"));
      gated[prefix + "_0.weight"] = tensor;
      gated[prefix + "_1.weight"] = Turned(tensor);
    } else {
      gated[name] = tensor;
    }
  }
  gated["lm_head.weight"] = Turned(plain.at("shared.weight"));
  return gated;
}

}  // namespace

std::unique_ptr<ModelFile> TinyT5() {
  auto file = OpenModelFile(FolderOfTinyT5(), {});
  PC_EXPECT_OK(file);
  return *std::move(file);
}

std::unique_ptr<ModelFile> TinyGatedT5() {
  TempDir dir;
  Json config = Json::parse(ReadFileOrDie(FolderOfTinyT5() + "/config.json"));
  config.erase("dense_act_fn");
  config.erase("is_gated_act");
  config.erase("scale_decoder_outputs");
  config["feed_forward_proj"] = "gated-gelu";
  config["tie_word_embeddings"] = false;
  config["num_heads"] = 3;
  config["num_decoder_layers"] = 1;
  WriteFileOrDie(dir.path() + "/config.json", config.dump());
  WriteTensors(
      dir.path() + "/model.safetensors",
      GatedTensors(ReadTensors(FolderOfTinyT5() + "/model.safetensors")));
  auto file = OpenModelFile(dir.path(), {});
  PC_EXPECT_OK(file);
  return *std::move(file);
}

absl::Status EncodeSegment(Backend& backend, std::span<const int32_t> ids,
                           PrivateSpan& span) {
  PC_ASSIGN_OR_RETURN(RowGroup group,
                      span.Append(ids, {}, LogitsWanted::kNone));
  group.part = RowPart::kEncoder;
  std::vector<float> ignored;
  return backend.Forward({&group, 1}, &ignored);
}

}  // namespace promptcache::worker
