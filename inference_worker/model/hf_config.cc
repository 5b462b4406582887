#include "inference_worker/model/hf_config.h"

#include <array>
#include <cmath>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/strings.h"
#include "inference_worker/model/json_text.h"

namespace promptcache::worker {

using nlohmann::json;

const json* HfConfig::Find(std::string_view key) const {
  const auto it = object_.find(std::string(key));
  return it == object_.end() || it->is_null() ? nullptr : &*it;
}

HfConfig HfConfig::Inside(std::string_view key) const {
  return HfConfig(*Find(key), Name(key) + ".");
}

std::string HfConfig::Name(std::string_view key) const {
  return path_ + std::string(key);
}

absl::Status HfConfig::Missing(std::string_view key) const {
  return absl::InvalidArgumentError(
      absl::StrCat("config.json: ", Name(key), " is missing"));
}

absl::Status HfConfig::Wrong(std::string_view key,
                             std::string_view wanted) const {
  return absl::InvalidArgumentError(absl::StrCat("config.json: ", Name(key),
                                                 ": ", DescribeJson(*Find(key)),
                                                 " is not ", ToAbsl(wanted)));
}

absl::Status HfConfig::Unsupported(std::string_view key,
                                   std::string_view why) const {
  const json* value = Find(key);
  return absl::InvalidArgumentError(
      absl::StrCat("config.json: ", Name(key), ": ",
                   value == nullptr ? "its default" : DescribeJson(*value),
                   " is not supported", why.empty() ? "" : "; ", ToAbsl(why)));
}

absl::StatusOr<uint32_t> HfConfig::Dimension(
    std::string_view key, uint32_t max,
    std::optional<uint32_t> fallback) const {
  const json* value = Find(key);
  if (value == nullptr) {
    if (fallback.has_value()) return *fallback;
    return Missing(key);
  }
  if (!value->is_number_unsigned() || value->get<uint64_t>() == 0 ||
      value->get<uint64_t>() > max) {
    return Wrong(key, absl::StrCat("an integer from 1 to ", max));
  }
  return value->get<uint32_t>();
}

absl::StatusOr<float> HfConfig::PositiveFloat(
    std::string_view key, std::optional<float> fallback) const {
  const json* value = Find(key);
  if (value == nullptr) {
    if (fallback.has_value()) return *fallback;
    return Missing(key);
  }
  // In float, so that what is too small or too large for it is refused.
  const float number =
      value->is_number() ? static_cast<float>(value->get<double>()) : 0;
  if (!std::isfinite(number) || number <= 0) {
    return Wrong(key, "a positive number");
  }
  return number;
}

absl::StatusOr<bool> HfConfig::Bool(std::string_view key, bool fallback) const {
  const json* value = Find(key);
  if (value == nullptr) return fallback;
  if (!value->is_boolean()) return Wrong(key, "true or false");
  return value->get<bool>();
}

absl::StatusOr<std::string> HfConfig::String(
    std::string_view key, std::optional<std::string> fallback) const {
  const json* value = Find(key);
  if (value == nullptr) {
    if (fallback.has_value()) return *fallback;
    return Missing(key);
  }
  if (!value->is_string()) return Wrong(key, "a string");
  return value->get<std::string>();
}

absl::Status HfConfig::RequireBool(std::string_view key, bool value) const {
  PC_ASSIGN_OR_RETURN(const bool found, Bool(key, value));
  return found == value ? absl::OkStatus() : Unsupported(key, "");
}

absl::Status HfConfig::RequireAbsent(
    std::initializer_list<std::string_view> keys) const {
  for (const std::string_view key : keys) {
    if (Has(key)) return Unsupported(key, "");
  }
  return absl::OkStatus();
}

absl::StatusOr<Activation> ReadHfActivation(const HfConfig& file,
                                            std::string_view key,
                                            std::string_view fallback) {
  struct Name {
    std::string_view name;
    Activation activation;
  };
  constexpr std::array<Name, 9> kNames = {{
      {"silu", Activation::kSilu},
      {"swish", Activation::kSilu},
      {"gelu", Activation::kGelu},
      {"gelu_python", Activation::kGelu},
      {"gelu_new", Activation::kGeluTanh},
      {"gelu_fast", Activation::kGeluTanh},
      {"gelu_pytorch_tanh", Activation::kGeluTanh},
      {"gelu_python_tanh", Activation::kGeluTanh},
      {"relu", Activation::kRelu},
  }};
  PC_ASSIGN_OR_RETURN(const std::string name,
                      file.String(key, std::string(fallback)));
  for (const Name& known : kNames) {
    if (known.name == name) return known.activation;
  }
  return file.Unsupported(key, "supported: silu, gelu, gelu_new, relu");
}

absl::Status ReadHfWindows(const HfConfig& file, uint32_t window,
                           bool (*is_local)(uint32_t layer, uint32_t argument),
                           uint32_t argument, ModelConfig* config) {
  if (window == 0) return absl::OkStatus();
  config->layer_windows.assign(config->num_layers, 0);
  const json* types = file.Find("layer_types");
  if (types != nullptr &&
      (!types->is_array() || types->size() != config->num_layers)) {
    return file.Unsupported(
        "layer_types",
        absl::StrCat("it must list ", config->num_layers, " layers"));
  }
  for (uint32_t layer = 0; layer < config->num_layers; ++layer) {
    bool local = is_local(layer, argument);
    if (types != nullptr) {
      const json& type = (*types)[layer];
      local = type == "sliding_attention";
      if (!local && type != "full_attention") {
        return absl::InvalidArgumentError(
            absl::StrCat("config.json: layer_types[", layer,
                         "]: ", DescribeJson(type), " is not supported"));
      }
    }
    if (local) config->layer_windows[layer] = window;
  }
  return absl::OkStatus();
}

}  // namespace promptcache::worker
