#include "common/pml/plan_order.h"

#include <algorithm>
#include <list>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/pml/error.h"
#include "common/status_macros.h"
#include "common/strings.h"

namespace promptcache::pml {
namespace {

constexpr int32_t kNoMessage = -1;

// Markers, or that the chat template has none for what the plan asks.
absl::StatusOr<Marker> OrFault(absl::StatusOr<Marker> marker) {
  if (marker.ok()) return marker;
  return PmlError{.reason = "PML_CHAT_TEMPLATE",
                  .source = Source::kPrompt,
                  .detail = std::string(marker.status().message())}
      .ToStatus();
}

class Order {
 public:
  Order(const JudgedPrompt& prompt, const ChatTemplate& chat_template)
      : prompt_(prompt),
        tree_(*prompt.tree),
        template_(chat_template),
        roles_(tree_.messages),
        open_(tree_.preamble_message),
        before_(tree_.preamble_last),
        any_message_(tree_.preamble_has_message),
        continued_(tree_.messages.size(), false) {
    for (size_t i = 1; i < tree_.modules.size(); ++i) {
      const SchemaModule& m = tree_.modules[i];
      if (!m.named) waiting_.push_back(static_cast<int32_t>(i));
      any_message_ |= m.has_message && prompt.imported[i];
    }
    for (size_t i = 0; i < prompt.steps.size(); ++i) {
      if (prompt.steps[i].kind == JudgedStep::Kind::kBlock) {
        last_block_ = static_cast<int64_t>(i);
      }
    }
  }

  absl::StatusOr<std::vector<PlanItem>> Run();

 private:
  const SchemaModule& module(int32_t index) const {
    return tree_.modules[static_cast<size_t>(index)];
  }

  absl::Status BeginRole(size_t step);
  absl::Status EndRole(size_t step);
  absl::Status PlaceBlock(size_t step);
  // Places the anonymous modules that stand before module `end` in the schema,
  // those of them for which `wanted(message)`.
  template <typename Wanted>
  absl::Status PlaceWaiting(int32_t end, const Wanted& wanted);
  absl::Status PlaceAllWaiting(int32_t end) {
    return PlaceWaiting(end, [](int32_t) { return true; });
  }
  int32_t EndOfSchema() const {
    return static_cast<int32_t>(tree_.modules.size());
  }
  void Place(int32_t index);
  absl::Status SetMessage(int32_t message);
  // Follows the messages that a block holds; markers in it were made before it
  // was known what comes before it.
  absl::Status FollowMessages(int32_t module, bool* is_first);
  absl::Status FollowText(const TextMessages& messages, bool is_first);
  void EndFreshText();

  const JudgedPrompt& prompt_;
  const SchemaTree& tree_;
  const ChatTemplate& template_;
  std::vector<Role> roles_;     // by message: the schema's, then the prompt's
  std::list<int32_t> waiting_;  // anonymous modules not placed yet, in order
  int64_t last_block_ = -1;     // a step
  int32_t open_;                // the message that is open
  std::optional<Role> before_;  // of the last message that began
  bool any_message_;
  bool in_role_ = false;
  size_t role_begin_ = 0;        // step of the role element
  std::vector<bool> continued_;  // by message of the schema
  MarkedText fresh_;             // not ended yet
  std::vector<PlanItem> out_;
};

absl::StatusOr<std::vector<PlanItem>> Order::Run() {
  if (last_block_ < 0) PC_RETURN_IF_ERROR(PlaceAllWaiting(EndOfSchema()));
  for (size_t i = 0; i < prompt_.steps.size(); ++i) {
    switch (prompt_.steps[i].kind) {
      case JudgedStep::Kind::kText:
        fresh_.AppendText(prompt_.steps[i].text);
        break;
      case JudgedStep::Kind::kRoleBegin:
        PC_RETURN_IF_ERROR(BeginRole(i));
        break;
      case JudgedStep::Kind::kRoleEnd:
        PC_RETURN_IF_ERROR(EndRole(i));
        break;
      case JudgedStep::Kind::kBlock:
        PC_RETURN_IF_ERROR(PlaceBlock(i));
        break;
    }
  }
  PC_RETURN_IF_ERROR(SetMessage(kNoMessage));
  if (any_message_) {
    PC_ASSIGN_OR_RETURN(const Marker answer,
                        OrFault(template_.Answer(before_)));
    fresh_.AppendMarkers(answer);
  }
  EndFreshText();
  return std::move(out_);
}

absl::Status Order::BeginRole(size_t step) {
  const JudgedStep& begin = prompt_.steps[step];
  int32_t due = 0;  // what stands before the last of its imports is due in it
  for (size_t i = step; prompt_.steps[i].kind != JudgedStep::Kind::kRoleEnd;
       ++i) {
    due = std::max(due, prompt_.steps[i].module);
  }
  const auto can_continue = [&](int32_t message) {
    return message >= 0 && static_cast<size_t>(message) < continued_.size() &&
           !continued_[static_cast<size_t>(message)] &&
           roles_[static_cast<size_t>(message)] == begin.role;
  };
  int32_t message = kNoMessage;
  if (can_continue(begin.message)) {
    message = begin.message;
    PC_RETURN_IF_ERROR(
        PlaceWaiting(due, [&](int32_t other) { return other != message; }));
  } else {
    PC_RETURN_IF_ERROR(PlaceAllWaiting(due));
    if (begin.message < 0 && can_continue(open_)) message = open_;
  }
  if (message == kNoMessage) {
    message = static_cast<int32_t>(roles_.size());
    roles_.push_back(begin.role);
  } else {
    continued_[static_cast<size_t>(message)] = true;
  }
  PC_RETURN_IF_ERROR(SetMessage(message));
  any_message_ = true;
  in_role_ = true;
  role_begin_ = step;
  return absl::OkStatus();
}

absl::Status Order::EndRole(size_t step) {
  in_role_ = false;
  const int64_t begin = static_cast<int64_t>(role_begin_);
  if (last_block_ > begin && last_block_ < static_cast<int64_t>(step)) {
    PC_RETURN_IF_ERROR(PlaceAllWaiting(EndOfSchema()));
  }
  return absl::OkStatus();
}

absl::Status Order::PlaceBlock(size_t step) {
  const int32_t index = prompt_.steps[step].module;
  // In a role element only what stands in its message; the rest has been
  // placed before it, or will be after it.
  const auto place_waiting = [&](int32_t end) {
    return PlaceWaiting(
        end, [&](int32_t message) { return !in_role_ || message == open_; });
  };
  PC_RETURN_IF_ERROR(place_waiting(index));
  const SchemaModule& m = module(index);
  if (!in_role_) PC_RETURN_IF_ERROR(SetMessage(m.message));
  any_message_ |= m.message >= 0;
  bool is_first = true;
  PC_RETURN_IF_ERROR(FollowMessages(index, &is_first));
  Place(index);
  if (static_cast<int64_t>(step) != last_block_) return absl::OkStatus();
  return place_waiting(EndOfSchema());
}

absl::Status Order::FollowMessages(int32_t index, bool* is_first) {
  for (const SchemaPart& part : module(index).parts) {
    if (part.messages.has_value()) {
      PC_RETURN_IF_ERROR(FollowText(*part.messages, *is_first));
      *is_first = false;
    }
    for (const int32_t child : part.modules) {
      if (!prompt_.imported[static_cast<size_t>(child)]) continue;
      PC_RETURN_IF_ERROR(FollowMessages(child, is_first));
    }
  }
  return absl::OkStatus();
}

absl::Status Order::FollowText(const TextMessages& messages, bool is_first) {
  const Role role = messages.first;
  if (is_first && !messages.before.known) {
    PC_ASSIGN_OR_RETURN(const Marker lead,
                        OrFault(template_.Lead(before_, role)));
    fresh_.AppendMarkers(lead);
  } else {
    PC_ASSIGN_OR_RETURN(const Marker due,
                        OrFault(template_.Start(before_, role)));
    Marker written = template_.UsualStart(role);
    if (messages.before.known) {
      PC_ASSIGN_OR_RETURN(written,
                          OrFault(template_.Start(messages.before.role, role)));
    }
    // Cached: it cannot be written anew.
    if (due != written) {
      return PmlError{
          .reason = "PML_CHAT_TEMPLATE",
          .source = Source::kPrompt,
          .detail = absl::StrCat(
              "the model's chat template (", template_.name(), ") begins a ",
              ToAbsl(RoleName(role)),
              " message otherwise where another message is before it, and here "
              "one that is inside a module depends on which modules are "
              "imported before it: keep these messages in modules of the root")}
          .ToStatus();
    }
  }
  before_ = messages.last;
  return absl::OkStatus();
}

template <typename Wanted>
absl::Status Order::PlaceWaiting(int32_t end, const Wanted& wanted) {
  auto next = waiting_.begin();
  while (next != waiting_.end() && *next < end) {
    const int32_t index = *next;
    const int32_t message = module(index).message;
    if (!wanted(message)) {
      ++next;
      continue;
    }
    next = waiting_.erase(next);
    PC_RETURN_IF_ERROR(SetMessage(message));
    any_message_ |= message >= 0;
    Place(index);
  }
  return absl::OkStatus();
}

void Order::Place(int32_t index) {
  EndFreshText();
  out_.push_back({.module = index});
}

absl::Status Order::SetMessage(int32_t message) {
  if (message == open_) return absl::OkStatus();
  const auto role = [&](int32_t of) { return roles_[static_cast<size_t>(of)]; };
  if (open_ >= 0) fresh_.AppendMarkers(template_.End(role(open_)));
  open_ = message;
  if (message < 0) return absl::OkStatus();
  PC_ASSIGN_OR_RETURN(const Marker start,
                      OrFault(template_.Start(before_, role(message))));
  fresh_.AppendMarkers(start);
  before_ = role(message);
  return absl::OkStatus();
}

void Order::EndFreshText() {
  if (fresh_.empty()) return;
  out_.push_back({.text = std::exchange(fresh_, MarkedText())});
}

}  // namespace

absl::StatusOr<std::vector<PlanItem>> OrderPlan(
    const JudgedPrompt& prompt, const ChatTemplate& chat_template) {
  return Order(prompt, chat_template).Run();
}

}  // namespace promptcache::pml
