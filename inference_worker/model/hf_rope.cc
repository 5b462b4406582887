#include <algorithm>
#include <cmath>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "inference_worker/model/hf_config.h"
#include "inference_worker/model/model_limits.h"

namespace promptcache::worker {
namespace {

using nlohmann::json;

absl::Status ReadYarn(const HfConfig& object, RopeScaling* scaling) {
  PC_RETURN_IF_ERROR(object.RequireBool("truncate", true));
  PC_ASSIGN_OR_RETURN(scaling->beta_fast,
                      object.PositiveFloat("beta_fast", 32.0f));
  PC_ASSIGN_OR_RETURN(scaling->beta_slow,
                      object.PositiveFloat("beta_slow", 1.0f));
  if (object.Has("attention_factor")) {
    PC_ASSIGN_OR_RETURN(scaling->attention_factor,
                        object.PositiveFloat("attention_factor"));
  } else if (object.Has("mscale") && object.Has("mscale_all_dim")) {
    PC_ASSIGN_OR_RETURN(const float mscale, object.PositiveFloat("mscale"));
    PC_ASSIGN_OR_RETURN(const float all,
                        object.PositiveFloat("mscale_all_dim"));
    const auto scale = [factor = scaling->factor](float m) {
      return factor <= 1 ? 1.0 : 0.1 * m * std::log(factor) + 1.0;
    };
    scaling->attention_factor = static_cast<float>(scale(mscale) / scale(all));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<float>> ReadDivisors(const HfConfig& object,
                                                std::string_view key,
                                                size_t count) {
  const json* list = object.Find(key);
  if (list == nullptr || !list->is_array() || list->size() != count) {
    return object.Unsupported(key,
                              absl::StrCat("it must list ", count, " numbers"));
  }
  std::vector<float> divisors;
  for (const json& number : *list) {
    const float value =
        number.is_number() ? static_cast<float>(number.get<double>()) : 0;
    if (!std::isfinite(value) || value <= 0) {
      return object.Unsupported(key, "its numbers must be positive");
    }
    divisors.push_back(value);
  }
  return divisors;
}

absl::Status ReadLongRope(const HfConfig& file, const HfConfig& object,
                          const ModelConfig& config, RopeScaling* scaling) {
  // Where it stands moved between versions.
  const HfConfig& holder =
      object.Has("original_max_position_embeddings") ? object : file;
  PC_ASSIGN_OR_RETURN(
      scaling->original_context,
      holder.Dimension("original_max_position_embeddings", kMaxContext));
  const size_t count = config.rope.dims / 2;
  PC_ASSIGN_OR_RETURN(scaling->divisors,
                      ReadDivisors(object, "short_factor", count));
  PC_ASSIGN_OR_RETURN(scaling->long_divisors,
                      ReadDivisors(object, "long_factor", count));
  const float ratio = static_cast<float>(config.context_length) /
                      static_cast<float>(scaling->original_context);
  PC_ASSIGN_OR_RETURN(scaling->factor, object.PositiveFloat("factor", ratio));
  if (object.Has("attention_factor")) {
    PC_ASSIGN_OR_RETURN(scaling->attention_factor,
                        object.PositiveFloat("attention_factor"));
  } else {
    scaling->attention_factor =
        scaling->factor <= 1 || scaling->original_context == 1
            ? 1.0f
            : std::sqrt(1 + std::log(scaling->factor) /
                                std::log(static_cast<float>(
                                    scaling->original_context)));
  }
  return absl::OkStatus();
}

absl::Status ReadScaling(const HfConfig& file, const HfConfig& object,
                         ModelConfig* config) {
  RopeScaling& scaling = config->rope.scaling;
  const std::string_view type_key =
      object.Has("rope_type") ? "rope_type" : "type";
  PC_ASSIGN_OR_RETURN(const std::string type,
                      object.String(type_key, "default"));
  if (type == "default") return absl::OkStatus();
  if (type == "longrope" || type == "su") {
    scaling.kind = RopeScalingKind::kLongRope;
    return ReadLongRope(file, object, *config, &scaling);
  }
  PC_ASSIGN_OR_RETURN(scaling.factor, object.PositiveFloat("factor"));
  if (type == "linear") {
    scaling.kind = RopeScalingKind::kLinear;
    return absl::OkStatus();
  }
  if (type == "dynamic") {
    scaling.kind = RopeScalingKind::kDynamicNtk;
    scaling.original_context = config->context_length;
    return absl::OkStatus();
  }
  constexpr std::string_view kContextKey = "original_max_position_embeddings";
  if (type == "llama3") {
    scaling.kind = RopeScalingKind::kLlama3;
    PC_ASSIGN_OR_RETURN(scaling.original_context,
                        object.Dimension(kContextKey, kMaxContext));
    PC_ASSIGN_OR_RETURN(scaling.low_freq_factor,
                        object.PositiveFloat("low_freq_factor"));
    PC_ASSIGN_OR_RETURN(scaling.high_freq_factor,
                        object.PositiveFloat("high_freq_factor"));
    if (scaling.high_freq_factor <= scaling.low_freq_factor) {
      return object.Unsupported("high_freq_factor",
                                "it must exceed low_freq_factor");
    }
    return absl::OkStatus();
  }
  if (type == "yarn") {
    scaling.kind = RopeScalingKind::kYarn;
    PC_ASSIGN_OR_RETURN(
        scaling.original_context,
        object.Dimension(kContextKey, kMaxContext, config->context_length));
    return ReadYarn(object, &scaling);
  }
  return object.Unsupported(
      type_key, "supported: default, linear, llama3, yarn, dynamic, longrope");
}

}  // namespace

absl::Status ReadHfRopeObject(const HfConfig& file, const HfConfig& object,
                              float partial, ModelConfig* config) {
  RopeConfig& rope = config->rope;
  // A rotation for each kind of layer: a family that has them reads them
  // itself.
  PC_RETURN_IF_ERROR(
      object.RequireAbsent({"full_attention", "sliding_attention"}));
  PC_ASSIGN_OR_RETURN(rope.theta,
                      object.PositiveFloat("rope_theta", rope.theta));
  const HfConfig& holder = object.Has("partial_rotary_factor") ? object : file;
  PC_ASSIGN_OR_RETURN(partial,
                      holder.PositiveFloat("partial_rotary_factor", partial));
  const double dims = double{partial} * config->head_dim;
  // The factor was rounded to float: 0.7 of 10 elements are 7.
  rope.dims = static_cast<uint32_t>(std::min(dims + 1e-5, 1e9));
  if (rope.dims == 0 || rope.dims > config->head_dim || rope.dims % 2 != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "config.json: partial_rotary_factor: ", partial, " of a head's ",
        config->head_dim, " elements is not an even number of them"));
  }
  return ReadScaling(file, object, config);
}

absl::Status ReadHfRope(const HfConfig& file, float default_theta,
                        float partial, ModelConfig* config) {
  PC_ASSIGN_OR_RETURN(config->rope.theta,
                      file.PositiveFloat("rope_theta", default_theta));
  for (const std::string_view key : {"rope_parameters", "rope_scaling"}) {
    const json* value = file.Find(key);
    if (value == nullptr) continue;
    if (!value->is_object()) return file.Unsupported(key, "not an object");
    return ReadHfRopeObject(file, file.Inside(key), partial, config);
  }
  static const json kEmpty = json::object();
  return ReadHfRopeObject(file, HfConfig(kEmpty), partial, config);
}

}  // namespace promptcache::worker
