#include "inference_worker/cpu/attention_plan.h"

#include <algorithm>
#include <tuple>

namespace promptcache::worker::cpu {
namespace {

// Tasks per thread that a call is cut into when its blocks allow: enough for
// threads to end together, few enough for a task to be worth taking.
constexpr uint64_t kTasksPerThread = 4;
// Packed rows of one group: segments' states in memory cost more than they
// bring above this many, so a group with more neither splits nor shares. Groups
// that share are as many as kMaxPackedRows has room for; the next ones read the
// view again.
constexpr uint32_t kMaxSplitRows = 32;

int64_t VisibleTokens(const AttentionGroup& group) {
  int64_t tokens = group.own.num_tokens;
  for (const KvView& view : group.visible) tokens += view.num_tokens;
  return tokens;
}

// Of all of the group's rows together, about.
uint64_t TokensSeen(const AttentionShape& shape, const AttentionGroup& group) {
  const auto tokens = static_cast<uint64_t>(VisibleTokens(group));
  if (shape.window == 0) return tokens;
  return std::min<uint64_t>(tokens, uint64_t{shape.window} + group.num_rows);
}

// Row blocks so small that a prefill has several a thread, so large that
// unpacking a tile is little beside its use.
uint32_t RowsPerBlock(uint32_t heads_per_kv) {
  return std::max(1u, kMaxPackedRows * 3 / 4 / heads_per_kv);
}

void SetBias(const DistanceBias& bias, uint32_t first_head,
             AttentionTask* task) {
  task->bias = bias.Row(first_head);
  task->bias_stride = bias.row_floats();
  task->bias_reach = bias.reach();
}

AttentionTask TaskFor(const AttentionShape& shape, const AttentionGroup& group,
                      uint32_t kv_head) {
  const KvLayout& layout = shape.layout;
  const size_t head_offset = kv_head * layout.head_stride_bytes();
  const uint32_t heads_per_kv = shape.num_heads / layout.num_kv_heads;
  const size_t first_head = size_t{kv_head} * heads_per_kv * layout.head_dim;
  AttentionTask task = {
      .queries = group.queries + first_head,
      .query_stride = group.query_stride,
      .out = group.out + first_head,
      .out_stride = group.out_stride,
      .num_rows = group.num_rows,
      .heads_per_kv = heads_per_kv,
      .head_dim = layout.head_dim,
      .position = group.position,
      .own_limit = group.own.num_tokens - group.num_rows + 1,
      .window_begin = shape.window == 0
                          ? kNoWindow
                          : VisibleTokens(group) - group.num_rows + 1 -
                                int64_t{shape.window},
      .scale = shape.scale,
      .rope = ViewOf(shape.rope),
      .alibi_slopes = shape.alibi_slopes == nullptr
                          ? nullptr
                          : shape.alibi_slopes + kv_head * heads_per_kv,
      .key_offset = layout.key_offset_bytes(shape.layer) + head_offset,
      .value_offset = layout.value_offset_bytes(shape.layer) + head_offset,
      .page_tokens = layout.page_tokens};
  if (shape.distance_bias != nullptr) {
    SetBias(*shape.distance_bias, kv_head * heads_per_kv, &task);
  }
  return task;
}

// That some of the rows see, from a tile's beginning on, as they are read.
uint64_t TokensRead(const AttentionTask& task) {
  int64_t tokens = 0;
  for (uint32_t s = 0; s < task.num_segments; ++s) {
    const AttentionSegment& segment = task.segments[s];
    int64_t end = segment.num_tokens;
    if (segment.own) {
      end = std::min(end, int64_t{task.own_limit} + task.num_rows - 1 -
                              segment.first_token);
    }
    const int64_t hidden =
        std::max<int64_t>(0, task.window_begin - segment.tokens_before);
    tokens += std::max<int64_t>(0, end - hidden / kTileTokens * kTileTokens);
  }
  return static_cast<uint64_t>(tokens);
}

// Of one segment.
size_t StateFloats(const AttentionTask& task) {
  return task.num_rows * size_t{task.heads_per_kv} *
         (kStateHeader + task.head_dim);
}

AttentionTask Rows(AttentionTask task, uint32_t first, uint32_t count) {
  task.queries += first * task.query_stride;
  task.out += first * task.out_stride;
  task.position += static_cast<int32_t>(first);
  task.own_limit += first;
  task.window_begin += first;
  task.num_rows = count;
  return task;
}

}  // namespace

RopeView ViewOf(const RopeTable* rope) {
  if (rope == nullptr) return {};
  return {.table = rope->Cos(0),
          .num_pairs = rope->num_pairs(),
          .interleaved = rope->pairing() == Pairing::kInterleaved};
}

void AttentionPlan::AddView(const KvView& view, bool own,
                            int64_t tokens_before) {
  for (uint32_t first = 0; first < view.num_tokens; first += kSegmentTokens) {
    segments_.push_back(
        {.view = &view,
         .first_token = first,
         .num_tokens = std::min(kSegmentTokens, view.num_tokens - first),
         .own = own,
         .tokens_before = tokens_before + first});
  }
}

void AttentionPlan::AddSegments(const AttentionGroup& group) {
  const size_t first = segments_.size();
  int64_t tokens_before = 0;
  for (const KvView& view : group.visible) {
    AddView(view, /*own=*/false, tokens_before);
    tokens_before += view.num_tokens;
  }
  AddView(group.own, /*own=*/true, tokens_before);
  groups_.push_back({.first = first,
                     .count = static_cast<uint32_t>(segments_.size() - first)});
}

// Views that two groups or more see in full, sorted by what they are.
void AttentionPlan::FindSharedViews(const AttentionShape& shape,
                                    Groups groups) {
  const uint32_t heads_per_kv = shape.num_heads / shape.layout.num_kv_heads;
  for (uint32_t g = 0; g < groups.size(); ++g) {
    const AttentionGroup& group = groups[g];
    if (group.view_ids.empty() || group.num_rows == 0 ||
        group.num_rows * heads_per_kv > kMaxSplitRows) {
      continue;
    }
    const int64_t hidden =
        shape.window == 0 ? 0 : VisibleTokens(group) - int64_t{shape.window};
    size_t segment = groups_[g].first;
    for (size_t v = 0; v < group.visible.size(); ++v) {
      const KvView& view = group.visible[v];
      if (group.view_ids[v] != 0 && view.num_tokens >= kTileTokens &&
          hidden <= segments_[segment].tokens_before) {
        shared_views_.push_back({group.view_ids[v], g, &view, segment});
      }
      segment += (view.num_tokens + kSegmentTokens - 1) / kSegmentTokens;
    }
  }
  // No two are equal in all three.
  std::sort(shared_views_.begin(), shared_views_.end(),
            [](const SharedView& a, const SharedView& b) {
              return std::tie(a.id, a.group, a.first_segment) <
                     std::tie(b.id, b.group, b.first_segment);
            });
  // Those that nobody else sees.
  std::vector<SharedView> all;
  all.swap(shared_views_);
  for (size_t i = 0; i < all.size(); ++i) {
    if ((i > 0 && all[i - 1].id == all[i].id) ||
        (i + 1 < all.size() && all[i + 1].id == all[i].id)) {
      shared_views_.push_back(all[i]);
    }
  }
  segment_shared_.assign(segments_.size(), 0);
  for (const SharedView& shared : shared_views_) {
    groups_[shared.group].shares = true;
    const uint32_t count =
        (shared.view->num_tokens + kSegmentTokens - 1) / kSegmentTokens;
    for (uint32_t s = 0; s < count; ++s) {
      segment_shared_[shared.first_segment + s] = 1;
    }
  }
}

uint32_t AttentionPlan::SegmentsPerTask(const AttentionTask& work) const {
  const uint64_t segment_cost =
      work.num_rows * uint64_t{work.heads_per_kv} * kSegmentTokens;
  if (segment_cost == 0) return std::max(1u, work.num_segments);
  return static_cast<uint32_t>(std::clamp<uint64_t>(
      cost_per_task_ / segment_cost, 1, std::max(1u, work.num_segments)));
}

size_t AttentionPlan::AddStates(const AttentionTask& work) {
  const size_t offset = num_state_floats_;
  num_state_floats_ += work.num_segments * StateFloats(work);
  return offset;
}

AttentionPlan::Block* AttentionPlan::AddSplitBlock(const AttentionTask& whole) {
  blocks_.push_back({.merge = whole, .first_state = state_offsets_.size()});
  state_offsets_.resize(state_offsets_.size() + whole.num_segments);
  return &blocks_.back();
}

// The segments that the block has to itself.
void AttentionPlan::AddBlockTasks(size_t index) {
  Block& block = blocks_[index];
  const uint32_t per_task = SegmentsPerTask(block.merge);
  const size_t absolute =
      static_cast<size_t>(block.merge.segments - segments_.data());
  for (uint32_t first = 0; first < block.merge.num_segments;) {
    uint32_t count = 0;
    while (count < per_task && first + count < block.merge.num_segments &&
           segment_shared_[absolute + first + count] == 0) {
      ++count;
    }
    if (count == 0) {
      ++first;
      continue;
    }
    Task task = {.work = block.merge};
    task.work.segments += first;
    task.work.num_segments = count;
    task.state_offset = AddStates(task.work);
    task.first_block = task_blocks_.size();
    task.num_blocks = 1;
    task_blocks_.push_back(index);
    for (uint32_t s = 0; s < count; ++s) {
      state_offsets_[block.first_state + first + s] =
          task.state_offset + s * StateFloats(task.work);
    }
    tasks_.push_back(task);
    ++block.num_tasks;
    first += count;
  }
}

void AttentionPlan::AddBlock(AttentionTask whole, GroupSegments* group) {
  // Own tokens after the block's last row.
  while (whole.num_segments > 1) {
    const AttentionSegment& last = whole.segments[whole.num_segments - 1];
    if (!last.own || last.first_token < whole.own_limit + whole.num_rows - 1) {
      break;
    }
    --whole.num_segments;
  }
  // What no row's window reaches.
  while (whole.num_segments > 1 &&
         whole.segments->tokens_before + whole.segments->num_tokens <=
             whole.window_begin) {
    ++whole.segments;
    --whole.num_segments;
  }
  reads_.needed_tokens += TokensRead(whole);
  if (group->shares) {
    AddSplitBlock(whole);
    return;
  }
  const uint64_t packed_rows = whole.num_rows * uint64_t{whole.heads_per_kv};
  if (packed_rows > kMaxSplitRows ||
      SegmentsPerTask(whole) >= whole.num_segments) {
    tasks_.push_back({.work = whole});
    return;
  }
  AddSplitBlock(whole);
  AddBlockTasks(blocks_.size() - 1);
}

// One view, seen by `members`: as many of their rows as fit share a task.
void AttentionPlan::AddSharedTasks(const AttentionShape& shape, Groups groups,
                                   std::span<const SharedView> members) {
  const uint32_t max_rows =
      kMaxPackedRows / (shape.num_heads / shape.layout.num_kv_heads);
  while (!members.empty()) {
    uint32_t num_rows = 0;
    size_t count = 0;
    while (count < members.size()) {
      const uint32_t rows = groups[members[count].group].num_rows;
      if (count > 0 && num_rows + rows > max_rows) break;
      num_rows += rows;
      ++count;
    }
    for (uint32_t head = 0; head < shape.layout.num_kv_heads; ++head) {
      AttentionTask work = TaskFor(shape, groups[members[0].group], head);
      work.num_rows = num_rows;
      work.window_begin = kNoWindow;
      work.segments = segments_.data() + members[0].first_segment;
      work.num_segments =
          (members[0].view->num_tokens + kSegmentTokens - 1) / kSegmentTokens;
      AddSharedTask(work, groups, members.first(count), head);
    }
    members = members.subspan(count);
  }
}

void AttentionPlan::AddSharedTask(AttentionTask work, Groups groups,
                                  std::span<const SharedView> members,
                                  uint32_t kv_head) {
  const size_t first_row = rows_.size();
  const size_t head_offset =
      size_t{kv_head} * work.heads_per_kv * work.head_dim;
  for (const SharedView& member : members) {
    const AttentionGroup& group = groups[member.group];
    const int32_t shift =
        members[0].view->position_offset - member.view->position_offset;
    for (uint32_t row = 0; row < group.num_rows; ++row) {
      rows_.push_back({group.queries + row * group.query_stride + head_offset,
                       group.position + static_cast<int32_t>(row) + shift});
    }
  }
  const AttentionSegment* const segments = work.segments;
  const uint32_t num_segments = work.num_segments;
  const uint32_t per_task = SegmentsPerTask(work);
  for (uint32_t first = 0; first < num_segments; first += per_task) {
    work.segments = segments + first;
    work.num_segments = std::min(per_task, num_segments - first);
    const Task task = {.work = work,
                       .state_offset = AddStates(work),
                       .shared = true,
                       .first_row = first_row,
                       .first_block = task_blocks_.size(),
                       .num_blocks = static_cast<uint32_t>(members.size())};
    tasks_.push_back(task);
    size_t in_segment = 0;  // where the member's rows begin
    for (const SharedView& member : members) {
      const size_t index = groups_[member.group].first_block + kv_head;
      Block& block = blocks_[index];
      const size_t state =
          block.first_state + member.first_segment + first -
          static_cast<size_t>(block.merge.segments - segments_.data());
      for (uint32_t s = 0; s < work.num_segments; ++s) {
        state_offsets_[state + s] =
            task.state_offset + s * StateFloats(work) + in_segment;
      }
      in_segment += StateFloats(block.merge);
      task_blocks_.push_back(index);
      ++block.num_tasks;
    }
  }
}

void AttentionPlan::PointToStates() {
  if (states_capacity_ < num_state_floats_) {
    states_capacity_ = 2 * num_state_floats_;
    states_ = std::make_unique_for_overwrite<float[]>(states_capacity_);
  }
  segment_states_.clear();
  for (const size_t offset : state_offsets_) {
    segment_states_.push_back(states_.get() + offset);
  }
  if (tasks_left_capacity_ < blocks_.size()) {
    tasks_left_capacity_ = 2 * blocks_.size();
    tasks_left_ =
        std::make_unique<std::atomic<uint32_t>[]>(tasks_left_capacity_);
  }
  for (size_t i = 0; i < blocks_.size(); ++i) {
    blocks_[i].merge.segment_states =
        segment_states_.data() + blocks_[i].first_state;
    tasks_left_[i].store(blocks_[i].num_tasks, std::memory_order_relaxed);
  }
}

void AttentionPlan::Build(const AttentionShape& shape, Groups groups,
                          uint32_t num_threads) {
  segments_.clear();
  groups_.clear();
  shared_views_.clear();
  tasks_.clear();
  task_blocks_.clear();
  rows_.clear();
  blocks_.clear();
  state_offsets_.clear();
  num_state_floats_ = 0;
  reads_ = {};
  uint64_t cost = 0;
  for (const AttentionGroup& group : groups) {
    cost += TokensSeen(shape, group) * group.num_rows * shape.num_heads;
    AddSegments(group);
  }
  cost_per_task_ =
      num_threads == 1 ? UINT64_MAX : cost / (num_threads * kTasksPerThread);
  FindSharedViews(shape, groups);
  const uint32_t block_rows =
      RowsPerBlock(shape.num_heads / shape.layout.num_kv_heads);
  for (size_t i = 0; i < groups.size(); ++i) {
    const AttentionGroup& group = groups[i];
    groups_[i].first_block = blocks_.size();
    for (uint32_t head = 0; head < shape.layout.num_kv_heads; ++head) {
      AttentionTask whole = TaskFor(shape, group, head);
      whole.segments = segments_.data() + groups_[i].first;
      whole.num_segments = groups_[i].count;
      for (uint32_t row = 0; row < group.num_rows; row += block_rows) {
        AddBlock(Rows(whole, row, std::min(block_rows, group.num_rows - row)),
                 &groups_[i]);
      }
    }
  }
  // The largest first.
  for (size_t i = 0, end = 0; i < shared_views_.size(); i = end) {
    while (end < shared_views_.size() &&
           shared_views_[end].id == shared_views_[i].id) {
      ++end;
    }
    AddSharedTasks(shape, groups, std::span(shared_views_).subspan(i, end - i));
  }
  for (const GroupSegments& group : groups_) {
    for (uint32_t head = 0; group.shares && head < shape.layout.num_kv_heads;
         ++head) {
      AddBlockTasks(group.first_block + head);
    }
  }
  PointToStates();
  CountReads(shape.layout.num_kv_heads);
}

// Tasks of all kv heads read the same tokens.
void AttentionPlan::CountReads(uint32_t num_kv_heads) {
  for (const Task& task : tasks_) reads_.read_tokens += TokensRead(task.work);
  reads_.needed_tokens /= num_kv_heads;
  reads_.read_tokens /= num_kv_heads;
}

void AttentionPlan::RunTask(const IsaKernels& isa, size_t index,
                            std::byte* scratch) {
  const Task& task = tasks_[index];
  AttentionTask work = task.work;
  work.scratch = scratch;
  if (task.num_blocks == 0) return isa.attend(work);
  if (task.shared) work.rows = rows_.data() + task.first_row;
  work.states = states_.get() + task.state_offset;
  isa.attend(work);
  for (uint32_t i = 0; i < task.num_blocks; ++i) {
    const size_t block = task_blocks_[task.first_block + i];
    // The last to end sees what the others wrote.
    if (tasks_left_[block].fetch_sub(1, std::memory_order_acq_rel) == 1) {
      isa.merge_states(blocks_[block].merge);
    }
  }
}

}  // namespace promptcache::worker::cpu
