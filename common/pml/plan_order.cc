#include "common/pml/plan_order.h"

#include <algorithm>
#include <list>
#include <utility>

namespace promptcache::pml {
namespace {

constexpr int32_t kNoMessage = -1;

class Order {
 public:
  Order(const JudgedPrompt& prompt, const ChatTemplate& chat_template)
      : prompt_(prompt),
        tree_(*prompt.tree),
        template_(chat_template),
        roles_(tree_.messages),
        open_(tree_.preamble_message),
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

  std::vector<PlanItem> Run();

 private:
  const SchemaModule& module(int32_t index) const {
    return tree_.modules[static_cast<size_t>(index)];
  }

  void BeginRole(size_t step);
  void EndRole(size_t step);
  void PlaceBlock(size_t step);
  // Places the anonymous modules that stand before module `end` in the schema,
  // those of them for which `wanted(message)`.
  template <typename Wanted>
  void PlaceWaiting(int32_t end, const Wanted& wanted);
  void PlaceAllWaiting(int32_t end) {
    PlaceWaiting(end, [](int32_t) { return true; });
  }
  int32_t EndOfSchema() const {
    return static_cast<int32_t>(tree_.modules.size());
  }
  void Place(int32_t index);
  void SetMessage(int32_t message);
  void EndFreshText();

  const JudgedPrompt& prompt_;
  const SchemaTree& tree_;
  const ChatTemplate& template_;
  std::vector<Role> roles_;     // by message: the schema's, then the prompt's
  std::list<int32_t> waiting_;  // anonymous modules not placed yet, in order
  int64_t last_block_ = -1;     // a step
  int32_t open_;                // the message that is open
  bool any_message_;
  bool in_role_ = false;
  size_t role_begin_ = 0;        // step of the role element
  std::vector<bool> continued_;  // by message of the schema
  MarkedText fresh_;             // not ended yet
  std::vector<PlanItem> out_;
};

std::vector<PlanItem> Order::Run() {
  if (last_block_ < 0) PlaceAllWaiting(EndOfSchema());
  for (size_t i = 0; i < prompt_.steps.size(); ++i) {
    switch (prompt_.steps[i].kind) {
      case JudgedStep::Kind::kText:
        fresh_.AppendText(prompt_.steps[i].text);
        break;
      case JudgedStep::Kind::kRoleBegin:
        BeginRole(i);
        break;
      case JudgedStep::Kind::kRoleEnd:
        EndRole(i);
        break;
      case JudgedStep::Kind::kBlock:
        PlaceBlock(i);
        break;
    }
  }
  SetMessage(kNoMessage);
  if (any_message_) {
    fresh_.AppendMarkers(template_.markers(Role::kAssistant).start);
  }
  EndFreshText();
  return std::move(out_);
}

void Order::BeginRole(size_t step) {
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
    PlaceWaiting(due, [&](int32_t other) { return other != message; });
  } else {
    PlaceAllWaiting(due);
    if (begin.message < 0 && can_continue(open_)) message = open_;
  }
  if (message == kNoMessage) {
    message = static_cast<int32_t>(roles_.size());
    roles_.push_back(begin.role);
  } else {
    continued_[static_cast<size_t>(message)] = true;
  }
  SetMessage(message);
  any_message_ = true;
  in_role_ = true;
  role_begin_ = step;
}

void Order::EndRole(size_t step) {
  in_role_ = false;
  const int64_t begin = static_cast<int64_t>(role_begin_);
  if (last_block_ > begin && last_block_ < static_cast<int64_t>(step)) {
    PlaceAllWaiting(EndOfSchema());
  }
}

void Order::PlaceBlock(size_t step) {
  const int32_t index = prompt_.steps[step].module;
  // In a role element only what stands in its message; the rest has been
  // placed before it, or will be after it.
  const auto place_waiting = [&](int32_t end) {
    PlaceWaiting(
        end, [&](int32_t message) { return !in_role_ || message == open_; });
  };
  place_waiting(index);
  const SchemaModule& m = module(index);
  if (!in_role_) SetMessage(m.message);
  any_message_ |= m.message >= 0;
  Place(index);
  if (static_cast<int64_t>(step) == last_block_) place_waiting(EndOfSchema());
}

template <typename Wanted>
void Order::PlaceWaiting(int32_t end, const Wanted& wanted) {
  auto next = waiting_.begin();
  while (next != waiting_.end() && *next < end) {
    const int32_t index = *next;
    const int32_t message = module(index).message;
    if (!wanted(message)) {
      ++next;
      continue;
    }
    next = waiting_.erase(next);
    SetMessage(message);
    any_message_ |= message >= 0;
    Place(index);
  }
}

void Order::Place(int32_t index) {
  EndFreshText();
  out_.push_back({.module = index});
}

void Order::SetMessage(int32_t message) {
  if (message == open_) return;
  const auto role = [&](int32_t of) { return roles_[static_cast<size_t>(of)]; };
  if (open_ >= 0) fresh_.AppendMarkers(template_.markers(role(open_)).end);
  if (message >= 0)
    fresh_.AppendMarkers(template_.markers(role(message)).start);
  open_ = message;
}

void Order::EndFreshText() {
  if (fresh_.empty()) return;
  out_.push_back({.text = std::exchange(fresh_, MarkedText())});
}

}  // namespace

std::vector<PlanItem> OrderPlan(const JudgedPrompt& prompt,
                                const ChatTemplate& chat_template) {
  return Order(prompt, chat_template).Run();
}

}  // namespace promptcache::pml
