#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "inference_worker/cpu/isa_kernels.h"
#include "inference_worker/cpu/kernels.h"

namespace promptcache::worker::cpu {

// The table as kernels see it; null: nothing is rotated.
RopeView ViewOf(const RopeTable* rope);

// Cuts one call of Attend into tasks of about equal cost: blocks of query rows
// for one kv head, and, where there are too few of those for the threads
// (decoding), ranges of segments of a block. A view that several groups of few
// rows see (AttentionGroup::view_ids) is one task for the rows of all of them,
// so that it is read and unpacked once. The last task of a block to end merges
// the states of its segments. Which cut is made cannot be seen in the results:
// the order of summation is the same either way (isa_kernels.h).
//
// Thread-compatible; RunTask may run on several threads at once. Kept between
// calls for its memory.
class AttentionPlan {
 public:
  void Build(const AttentionShape& shape,
             std::span<const AttentionGroup> groups, uint32_t num_threads);
  size_t num_tasks() const { return tasks_.size(); }
  // Of all tasks together, for one kv head.
  const AttentionReads& reads() const { return reads_; }
  void RunTask(const IsaKernels& isa, size_t index, std::byte* scratch);

 private:
  struct Task {
    AttentionTask work;
    size_t state_offset = 0;  // floats into states_
    // Of several groups: index into rows_.
    bool shared = false;
    size_t first_row = 0;
    // Blocks that it computes states for, in task_blocks_; none: it writes the
    // outputs itself.
    size_t first_block = 0;
    uint32_t num_blocks = 0;
  };
  // Rows whose segments are computed by several tasks.
  struct Block {
    AttentionTask merge;  // all of its segments
    uint32_t num_tasks = 0;
    size_t first_state = 0;  // of its segments, in state_offsets_
  };
  // A group's segments, in segments_.
  struct GroupSegments {
    size_t first = 0;
    uint32_t count = 0;
    bool shares = false;     // some of them with other groups
    size_t first_block = 0;  // a block a kv head, when it shares
  };
  // A view of a group that others see, too.
  struct SharedView {
    uint32_t id = 0;
    uint32_t group = 0;
    const KvView* view = nullptr;
    size_t first_segment = 0;
  };
  using Groups = std::span<const AttentionGroup>;

  void AddSegments(const AttentionGroup& group);
  void AddView(const KvView& view, bool own, int64_t tokens_before);
  void FindSharedViews(const AttentionShape& shape, Groups groups);
  void AddBlock(AttentionTask whole, GroupSegments* group);
  Block* AddSplitBlock(const AttentionTask& whole);
  void AddBlockTasks(size_t index);
  void AddSharedTasks(const AttentionShape& shape, Groups groups,
                      std::span<const SharedView> members);
  void AddSharedTask(AttentionTask work, Groups groups,
                     std::span<const SharedView> members, uint32_t kv_head);
  uint32_t SegmentsPerTask(const AttentionTask& work) const;
  size_t AddStates(const AttentionTask& work);
  void PointToStates();
  void CountReads(uint32_t num_kv_heads);

  uint64_t cost_per_task_ = 0;
  AttentionReads reads_;
  std::vector<AttentionSegment> segments_;
  std::vector<uint8_t> segment_shared_;  // parallel to segments_
  std::vector<GroupSegments> groups_;
  std::vector<SharedView> shared_views_;
  std::vector<Task> tasks_;
  std::vector<size_t> task_blocks_;
  std::vector<AttentionRow> rows_;
  std::vector<Block> blocks_;
  std::vector<size_t> state_offsets_;
  std::vector<float*> segment_states_;  // parallel: into states_
  size_t num_state_floats_ = 0;
  std::unique_ptr<float[]> states_;
  size_t states_capacity_ = 0;
  std::unique_ptr<std::atomic<uint32_t>[]> tasks_left_;
  size_t tasks_left_capacity_ = 0;
};

}  // namespace promptcache::worker::cpu
