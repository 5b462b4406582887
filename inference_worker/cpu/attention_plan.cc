#include "inference_worker/cpu/attention_plan.h"

#include <algorithm>

namespace promptcache::worker::cpu {
namespace {

// Tasks per thread that a call is cut into when its blocks allow: enough for
// threads to end together, few enough for a task to be worth taking.
constexpr uint64_t kTasksPerThread = 4;
// Segments' states in memory cost more than they bring above this many rows.
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
    segments.push_back(
        {.view = &view,
         .first_token = first,
         .num_tokens = std::min(kSegmentTokens, view.num_tokens - first),
         .own = own,
         .tokens_before = tokens_before + first});
  }
}

AttentionPlan::GroupSegments AttentionPlan::AddSegments(
    const AttentionGroup& group) {
  const size_t first = segments.size();
  int64_t tokens_before = 0;
  for (const KvView& view : group.visible) {
    AddView(view, /*own=*/false, tokens_before);
    tokens_before += view.num_tokens;
  }
  AddView(group.own, /*own=*/true, tokens_before);
  return {.first = first,
          .count = static_cast<uint32_t>(segments.size() - first)};
}

void AttentionPlan::AddBlock(AttentionTask whole, uint64_t cost_per_task) {
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
  const uint64_t packed_rows = whole.num_rows * uint64_t{whole.heads_per_kv};
  const uint64_t segment_cost = packed_rows * kSegmentTokens;
  const auto per_task = static_cast<uint32_t>(std::clamp<uint64_t>(
      cost_per_task / segment_cost, 1, std::max(1u, whole.num_segments)));
  if (packed_rows > kMaxSplitRows || per_task >= whole.num_segments) {
    tasks.push_back({.work = whole});
    return;
  }
  Block block = {.merge = whole, .state_offset = states.size()};
  const size_t state_floats = packed_rows * (kStateHeader + whole.head_dim);
  states.resize(states.size() + whole.num_segments * state_floats);
  for (uint32_t first = 0; first < whole.num_segments; first += per_task) {
    Task task = {.work = whole, .block = static_cast<int32_t>(blocks.size())};
    task.work.segments += first;
    task.work.num_segments = std::min(per_task, whole.num_segments - first);
    tasks.push_back(task);
    ++block.num_tasks;
  }
  blocks.push_back(block);
}

void AttentionPlan::Build(const AttentionShape& shape,
                          std::span<const AttentionGroup> groups,
                          uint32_t num_threads) {
  segments.clear();
  tasks.clear();
  blocks.clear();
  states.clear();
  uint64_t cost = 0;
  std::vector<GroupSegments> group_segments;
  group_segments.reserve(groups.size());
  for (const AttentionGroup& group : groups) {
    cost += TokensSeen(shape, group) * group.num_rows * shape.num_heads;
    group_segments.push_back(AddSegments(group));
  }
  const uint64_t cost_per_task =
      num_threads == 1 ? UINT64_MAX : cost / (num_threads * kTasksPerThread);
  const uint32_t block_rows =
      RowsPerBlock(shape.num_heads / shape.layout.num_kv_heads);
  for (size_t i = 0; i < groups.size(); ++i) {
    const AttentionGroup& group = groups[i];
    for (uint32_t head = 0; head < shape.layout.num_kv_heads; ++head) {
      AttentionTask whole = TaskFor(shape, group, head);
      whole.segments = segments.data() + group_segments[i].first;
      whole.num_segments = group_segments[i].count;
      for (uint32_t row = 0; row < group.num_rows; row += block_rows) {
        AddBlock(Rows(whole, row, std::min(block_rows, group.num_rows - row)),
                 cost_per_task);
      }
    }
  }
  if (tasks_left_capacity < blocks.size()) {
    tasks_left_capacity = 2 * blocks.size();
    tasks_left = std::make_unique<std::atomic<uint32_t>[]>(tasks_left_capacity);
  }
  for (size_t i = 0; i < blocks.size(); ++i) {
    blocks[i].merge.states = states.data() + blocks[i].state_offset;
    tasks_left[i].store(blocks[i].num_tasks, std::memory_order_relaxed);
  }
}

void AttentionPlan::RunTask(const IsaKernels& isa, size_t index,
                            std::byte* scratch) {
  const Task& task = tasks[index];
  AttentionTask work = task.work;
  work.scratch = scratch;
  if (task.block < 0) return isa.attend(work);
  const Block& block = blocks[static_cast<size_t>(task.block)];
  const auto first = static_cast<size_t>(work.segments - block.merge.segments);
  work.states = block.merge.states + first * work.num_rows * work.heads_per_kv *
                                         (kStateHeader + work.head_dim);
  isa.attend(work);
  // The last to end sees what the others wrote.
  if (tasks_left[static_cast<size_t>(task.block)].fetch_sub(
          1, std::memory_order_acq_rel) == 1) {
    isa.merge_states(block.merge);
  }
}

}  // namespace promptcache::worker::cpu
