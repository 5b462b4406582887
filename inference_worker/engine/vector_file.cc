#include "inference_worker/engine/vector_file.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <stdexcept>

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

void ReadSegments(const Json& json, VectorCase& c) {
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
}

VectorCase ModularCase(const Json& json) {
  VectorCase c;
  ReadOutcome(json, c);
  ReadSegments(json, c);
  json.at("fresh_argmax").get_to(c.argmax);
  json.at("fresh_margin").get_to(c.margin);
  json.at("fresh_logsumexp").get_to(c.logsumexp);
  if (!c.logsumexp.empty()) c.last_logsumexp = c.logsumexp.back();
  return c;
}

// The values at every token that a folder's files give, from `json`; of list
// `index`, when they are lists of lists.
void ReadFolderOutcome(const Json& json, std::optional<size_t> index,
                       const char* argmax, const char* margin,
                       const char* logsumexp, VectorCase& c) {
  const auto field = [&](const char* name) -> const Json& {
    const Json& values = json.at(name);
    return index.has_value() ? values.at(*index) : values;
  };
  field(argmax).get_to(c.argmax);
  field(margin).get_to(c.margin);
  field(logsumexp).get_to(c.logsumexp);
  field("logits_last").get_to(c.last_logits);
  if (!c.logsumexp.empty()) c.last_logsumexp = c.logsumexp.back();
}

// A run of consecutive positions is a fresh item.
std::vector<VectorItem> ItemsAt(const std::vector<int32_t>& ids,
                                const std::vector<int32_t>& positions) {
  std::vector<VectorItem> items;
  for (size_t i = 0; i < std::min(ids.size(), positions.size()); ++i) {
    if (i == 0 || positions[i] != positions[i - 1] + 1) {
      items.push_back({.start = positions[i]});
    }
    items.back().fresh.push_back(ids[i]);
  }
  return items;
}

// What an encoder-decoder's file has besides, an entry an input.
void ReadEncoderDecoder(const Json& json, std::vector<VectorCase>& cases) {
  if (!json.contains("decoder_inputs")) return;
  for (size_t i = 0; i < cases.size(); ++i) {
    json.at("decoder_inputs").at(i).get_to(cases[i].decoder_ids);
    json.at("encoder_last").at(i).get_to(cases[i].encoder_last);
  }
}

std::vector<VectorCase> FolderCases(const Json& json) {
  std::vector<VectorCase> cases;
  const Json& inputs = json.at("inputs");
  for (size_t i = 0; i < inputs.size(); ++i) {
    VectorCase& c = cases.emplace_back();
    c.name = absl::StrCat("input ", i);
    c.plan.push_back({.fresh = inputs[i].get<std::vector<int32_t>>()});
    ReadFolderOutcome(json, i, "argmax", "argmax_margin", "logsumexp", c);
  }
  ReadEncoderDecoder(json, cases);
  for (const Json& greedy : json.at("greedy")) {
    VectorCase& c = cases.at(greedy.at("prompt_index").get<size_t>());
    greedy.at("new_ids").get_to(c.greedy_ids);
    greedy.at("margins").get_to(c.greedy_margins);
  }
  if (json.contains("positions_test")) {
    const Json& test = json.at("positions_test");
    VectorCase& c = cases.emplace_back();
    c.name = "positions_test";
    c.plan = ItemsAt(test.at("ids").get<std::vector<int32_t>>(),
                     test.at("position_ids").get<std::vector<int32_t>>());
    ReadFolderOutcome(test, {}, "argmax", "argmax_margin", "logsumexp", c);
  }
  return cases;
}

VectorCase FolderModularCase(const Json& json) {
  VectorCase c;
  json.at("name").get_to(c.name);
  ReadSegments(json, c);
  // A run of no tokens may stand anywhere.
  std::erase_if(c.plan, [](const VectorItem& item) {
    return !item.segment.has_value() && item.fresh.empty();
  });
  c.decoder_ids = Optional<std::vector<int32_t>>(json, "decoder_ids");
  const std::string of = c.decoder_ids.empty() ? "fresh_" : "decoder_";
  ReadFolderOutcome(json, {}, (of + "logits_argmax").c_str(),
                    (of + "argmax_margin").c_str(), (of + "logsumexp").c_str(),
                    c);
  return c;
}

std::vector<VectorCase> CasesOf(const Json& json) {
  std::vector<VectorCase> cases;
  if (json.contains("inputs")) return FolderCases(json);
  if (json.contains("vectors")) {
    for (const Json& c : json.at("vectors")) cases.push_back(PlainCase(c));
    return cases;
  }
  for (const Json& c : json.at("cases")) {
    cases.push_back(c.contains("logits_last") ? FolderModularCase(c)
                                              : ModularCase(c));
  }
  return cases;
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
  if (c.plan.empty() ||
      (c.decoder_ids.empty() && c.plan.back().segment.has_value())) {
    return Invalid("the plan does not end in fresh tokens");
  }
  return absl::OkStatus();
}

absl::Status CheckLengths(const VectorCase& c) {
  size_t fresh = c.decoder_ids.size();
  if (fresh == 0) {
    for (const VectorItem& item : c.plan) fresh += item.fresh.size();
  }
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
    cases = CasesOf(json);
  } catch (const Json::exception& e) {
    return Invalid(absl::StrCat("not a file of logit vectors: ", e.what()));
  } catch (const std::out_of_range&) {
    return Invalid("not a file of logit vectors: greedy of no input");
  }
  for (const VectorCase& c : cases) PC_RETURN_IF_ERROR(CheckCase(c));
  return cases;
}

}  // namespace promptcache::worker
