#include "inference_worker/engine/vector_file.h"

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace promptcache::worker {
namespace {

using Json = nlohmann::json;

// A field that may be absent: then empty.
template <typename T>
T Optional(const Json& object, const char* field) {
  return object.contains(field) ? object.at(field).get<T>() : T{};
}

void ReadOutcome(const Json& json, VectorCase& c) {
  json.at("name").get_to(c.name);
  json.at("top_last").at("ids").get_to(c.top_ids);
  json.at("top_last").at("logits").get_to(c.top_logits);
  if (json.contains("greedy")) {
    json.at("greedy").at("new_ids").get_to(c.greedy_ids);
    json.at("greedy").at("margins").get_to(c.greedy_margins);
  }
}

VectorCase PlainCase(const Json& json) {
  VectorCase c;
  ReadOutcome(json, c);
  c.plan.push_back({.fresh = json.at("ids").get<std::vector<int32_t>>()});
  json.at("argmax").get_to(c.argmax);
  json.at("margin").get_to(c.margin);
  json.at("nll").get_to(c.nll);
  json.at("logsumexp_last").get_to(c.last_logsumexp);
  return c;
}

VectorCase ModularCase(const Json& json) {
  VectorCase c;
  ReadOutcome(json, c);
  for (const Json& s : json.at("segments")) {
    c.segments.push_back({
        .ids = s.at("ids").get<std::vector<int32_t>>(),
        .encode_start = s.at("encode_start").get<int32_t>(),
        .context = Optional<std::vector<size_t>>(s, "context"),
    });
  }
  for (const Json& p : json.at("plan")) {
    VectorItem& item = c.plan.emplace_back();
    if (p.contains("segment")) item.segment = p.at("segment").get<size_t>();
    item.fresh = Optional<std::vector<int32_t>>(p, "fresh");
    p.at("start").get_to(item.start);
  }
  json.at("fresh_argmax").get_to(c.argmax);
  json.at("fresh_margin").get_to(c.margin);
  json.at("fresh_logsumexp").get_to(c.logsumexp);
  if (!c.logsumexp.empty()) c.last_logsumexp = c.logsumexp.back();
  return c;
}

absl::Status Invalid(const std::string& what) {
  return absl::InvalidArgumentError(what);
}

absl::Status CheckReferences(const VectorCase& c) {
  for (size_t i = 0; i < c.segments.size(); ++i) {
    if (c.segments[i].ids.empty()) {
      return Invalid(absl::StrCat("segment ", i, " has no ids"));
    }
    for (const size_t seen : c.segments[i].context) {
      if (seen >= i) {
        return Invalid(absl::StrCat("segment ", i, " sees segment ", seen,
                                    ", which is not before it"));
      }
    }
  }
  for (const VectorItem& item : c.plan) {
    if (item.segment.has_value() ? *item.segment >= c.segments.size()
                                 : item.fresh.empty()) {
      return Invalid("a plan item names no segment and holds no tokens");
    }
  }
  if (c.plan.empty() || c.plan.back().segment.has_value()) {
    return Invalid("the plan does not end in fresh tokens");
  }
  return absl::OkStatus();
}

absl::Status CheckLengths(const VectorCase& c) {
  size_t fresh = 0;
  for (const VectorItem& item : c.plan) fresh += item.fresh.size();
  if (c.argmax.size() != fresh || c.margin.size() != fresh) {
    return Invalid(absl::StrCat(fresh, " fresh tokens with ", c.argmax.size(),
                                " argmax and ", c.margin.size(), " margins"));
  }
  if (!c.logsumexp.empty() && c.logsumexp.size() != fresh) {
    return Invalid(absl::StrCat(fresh, " fresh tokens with ",
                                c.logsumexp.size(), " log-sum-exps"));
  }
  if (!c.nll.empty() && c.nll.size() + 1 != fresh) {
    return Invalid(absl::StrCat(fresh, " tokens with ", c.nll.size(), " nll"));
  }
  if (c.top_ids.size() != c.top_logits.size() ||
      c.greedy_ids.size() != c.greedy_margins.size()) {
    return Invalid("top_last or greedy: lists of different lengths");
  }
  return absl::OkStatus();
}

absl::Status CheckCase(const VectorCase& c) {
  absl::Status status = CheckReferences(c);
  if (status.ok()) status = CheckLengths(c);
  if (status.ok()) return status;
  return Invalid(absl::StrCat("case ", c.name, ": ", status.message()));
}

}  // namespace

absl::StatusOr<std::vector<VectorCase>> ParseVectorFile(
    std::string_view json_text) {
  std::vector<VectorCase> cases;
  // The JSON library throws; nothing gets past here.
  try {
    const Json json = Json::parse(json_text);
    if (json.contains("vectors")) {
      for (const Json& c : json.at("vectors")) cases.push_back(PlainCase(c));
    } else {
      for (const Json& c : json.at("cases")) cases.push_back(ModularCase(c));
    }
  } catch (const Json::exception& e) {
    return Invalid(absl::StrCat("not a file of logit vectors: ", e.what()));
  }
  for (const VectorCase& c : cases) PC_RETURN_IF_ERROR(CheckCase(c));
  return cases;
}

}  // namespace promptcache::worker
