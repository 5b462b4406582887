#include "cuda/kernels/attention_plan.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <utility>

namespace promptcache::gpu {
namespace {

// Blocks that a device is given at least, a multiprocessor, when keys are cut.
constexpr uint32_t kBlocksPerMultiprocessor = 2;
// A part of fewer tiles costs more in states than it brings.
constexpr uint32_t kMinTilesPerItem = 4;

// One item as it is collected, with its rows' places in the order of merging.
struct Item {
  bool large = false;
  uint32_t first_part = 0;
  uint32_t num_parts = 0;
  uint32_t first_row = 0;
  uint32_t num_rows = 0;
};

// A view that some groups see alike: its place among the views of each.
struct Piece {
  std::vector<uint32_t> slots;  // parallel to Work::groups
};
struct Work {
  std::vector<uint32_t> groups;
  std::vector<Piece> pieces;
};
struct Row {
  uint32_t member;  // of Work::groups
  uint32_t group;
  uint32_t index;  // among the group's rows
};

class Builder {
 public:
  Builder(const AttentionPlan::Options& options,
          std::span<const AttentionGroup> groups)
      : options_(options),
        groups_(groups),
        heads_(HeadBlocksOf(options.num_heads / options.num_kv_heads)),
        tile_(AttentionTileTokens(options.head_dim)),
        before_(groups.size()),
        pages_of_(groups.size()) {
    for (size_t g = 0; g < groups.size(); ++g) {
      const size_t slots = groups[g].visible.size() + 1;
      before_[g].resize(slots);
      pages_of_[g].assign(slots, kNoPages);
      for (size_t s = 1; s < slots; ++s) {
        before_[g][s] =
            before_[g][s - 1] +
            static_cast<int32_t>(groups[g].visible[s - 1].num_tokens);
      }
    }
  }

  void Run() {
    FindWork();
    uint64_t row_blocks = 0;
    for (const Work& work : work_) row_blocks += RowBlocksOf(work);
    const uint64_t blocks = std::max<uint64_t>(
        1, row_blocks * options_.num_kv_heads * heads_.count);
    const uint64_t wanted =
        uint64_t{kBlocksPerMultiprocessor} * options_.num_multiprocessors;
    const auto splits = static_cast<uint32_t>((wanted + blocks - 1) / blocks);
    for (const Work& work : work_) AddWork(work, splits);
    AddEmptyRows();
    AssignStates();
  }

  std::vector<std::byte> Bytes() const;
  AttentionGrid grid() const { return grid_; }
  uint32_t num_states() const { return num_states_; }

 private:
  static constexpr uint32_t kNoPages = UINT32_MAX;
  // Of a row: where an item stands among the row's.
  struct Use {
    uint32_t slot, token, item_row;
  };

  const KvView& ViewOf(uint32_t group, uint32_t slot) const {
    const AttentionGroup& g = groups_[group];
    return slot < g.visible.size() ? g.visible[slot] : g.own;
  }
  bool IsOwn(uint32_t group, uint32_t slot) const {
    return slot == groups_[group].visible.size();
  }
  // Tokens of its own span that a row sees.
  uint32_t OwnLimit(uint32_t group, uint32_t index) const {
    const AttentionGroup& g = groups_[group];
    return g.own.num_tokens == 0 ? 0
                                 : g.own.num_tokens - g.num_rows + index + 1;
  }
  uint32_t EndOf(uint32_t slot, const Row& row) const {
    return IsOwn(row.group, slot) ? OwnLimit(row.group, row.index)
                                  : ViewOf(row.group, slot).num_tokens;
  }
  // From the view's token 0 to the last token that the row sees at all.
  int32_t ReachOf(uint32_t slot, const Row& row) const {
    const AttentionGroup& g = groups_[row.group];
    return before_[row.group][g.visible.size()] +
           static_cast<int32_t>(OwnLimit(row.group, row.index)) -
           before_[row.group][slot];
  }

  using ViewKey = std::array<uint64_t, 5>;
  ViewKey KeyOf(const KvView& view) const;
  bool SameViews(const KvView& a, const KvView& b) const;
  bool IsLarge(uint64_t num_rows) const {
    return options_.batch_invariant ||
           num_rows * heads_.heads > kSmallBlockRows;
  }
  uint32_t RowsPerBlock(bool large) const {
    return (large ? kLargeBlockRows : kSmallBlockRows) / heads_.heads;
  }
  uint64_t RowsOf(const Work& work) const {
    uint64_t rows = 0;
    for (uint32_t group : work.groups) rows += groups_[group].num_rows;
    return rows;
  }
  uint64_t RowBlocksOf(const Work& work) const {
    const uint64_t rows = RowsOf(work);
    const uint32_t per_block = RowsPerBlock(IsLarge(rows));
    return (rows + per_block - 1) / per_block;
  }

  void FindWork();
  void FindShared(std::vector<std::vector<bool>>* shared);
  void AddWork(const Work& work, uint32_t splits);
  void AddBlock(const Work& work, std::span<const Row> rows, bool large,
                uint32_t splits);
  void BeginItem(bool large, std::span<const Row> rows);
  void AddPart(const Piece& piece, std::span<const Row> rows, uint32_t first,
               uint32_t end);
  uint32_t PagesOf(uint32_t group, uint32_t slot);
  void AddEmptyRows();
  void AssignStates();

  const AttentionPlan::Options& options_;
  const std::span<const AttentionGroup> groups_;
  const HeadBlocks heads_;
  const uint32_t tile_;
  std::vector<std::vector<int32_t>> before_;     // [group][slot] tokens
  std::vector<std::vector<uint32_t>> pages_of_;  // [group][slot] into pages_
  std::vector<Work> work_;

  std::vector<Item> items_;
  std::vector<AttentionPart> parts_;
  std::vector<AttentionItemRow> item_rows_;
  std::vector<AttentionPartRow> part_rows_;
  std::vector<AttentionMergedRow> merged_rows_;
  std::vector<const std::byte*> pages_;
  std::map<uint32_t, std::vector<Use>> uses_;  // by row
  AttentionGrid grid_;
  uint32_t num_states_ = 0;
};

Builder::ViewKey Builder::KeyOf(const KvView& view) const {
  const uint32_t last =
      (view.first_token + view.num_tokens - 1) / options_.page_tokens;
  return {
      reinterpret_cast<uint64_t>(
          view.pages[view.first_token / options_.page_tokens]),
      reinterpret_cast<uint64_t>(view.pages[last]),
      view.first_token % options_.page_tokens, view.num_tokens,
      options_.rotate_keys ? static_cast<uint32_t>(view.position_offset) : 0u};
}

// REQUIRES: KeyOf(a) == KeyOf(b).
bool Builder::SameViews(const KvView& a, const KvView& b) const {
  const uint32_t first_a = a.first_token / options_.page_tokens;
  const uint32_t first_b = b.first_token / options_.page_tokens;
  const uint32_t count =
      (a.first_token + a.num_tokens - 1) / options_.page_tokens - first_a + 1;
  return a.local_position == b.local_position &&
         std::equal(a.pages + first_a, a.pages + first_a + count,
                    b.pages + first_b);
}

// Works of several groups: the views that exactly these groups share.
void Builder::FindShared(std::vector<std::vector<bool>>* shared) {
  struct Users {
    std::vector<uint32_t> groups;
    Piece piece;
  };
  std::map<ViewKey, size_t> known;
  std::vector<Users> all;  // in the order in which views are first seen
  for (uint32_t g = 0; g < groups_.size(); ++g) {
    if (groups_[g].num_rows == 0 ||
        groups_[g].num_rows > RowsPerBlock(/*large=*/true) / 2) {
      continue;
    }
    for (uint32_t slot = 0; slot < groups_[g].visible.size(); ++slot) {
      const KvView& view = ViewOf(g, slot);
      if (view.num_tokens == 0) continue;
      const auto [it, fresh] = known.try_emplace(KeyOf(view), all.size());
      if (fresh) all.emplace_back();
      Users& users = all[it->second];
      if (!fresh &&
          (users.groups.back() == g ||
           !SameViews(ViewOf(users.groups[0], users.piece.slots[0]), view))) {
        continue;
      }
      users.groups.push_back(g);
      users.piece.slots.push_back(slot);
    }
  }
  std::map<std::vector<uint32_t>, size_t> works;
  for (Users& users : all) {
    if (users.groups.size() < 2) continue;
    for (size_t i = 0; i < users.groups.size(); ++i) {
      (*shared)[users.groups[i]][users.piece.slots[i]] = true;
    }
    const auto [it, fresh] = works.try_emplace(users.groups, work_.size());
    if (fresh) work_.push_back({std::move(users.groups), {}});
    work_[it->second].pieces.push_back(std::move(users.piece));
  }
}

void Builder::FindWork() {
  std::vector<std::vector<bool>> shared(groups_.size());
  for (size_t g = 0; g < groups_.size(); ++g) {
    shared[g].resize(groups_[g].visible.size() + 1);
  }
  FindShared(&shared);
  for (uint32_t g = 0; g < groups_.size(); ++g) {
    Work work = {.groups = {g}, .pieces = {}};
    for (uint32_t slot = 0; slot < shared[g].size(); ++slot) {
      if (shared[g][slot] || ViewOf(g, slot).num_tokens == 0) continue;
      work.pieces.push_back({.slots = {slot}});
    }
    if (groups_[g].num_rows > 0 && !work.pieces.empty()) {
      work_.push_back(std::move(work));
    }
  }
}

void Builder::AddWork(const Work& work, uint32_t splits) {
  std::vector<Row> rows;
  for (uint32_t m = 0; m < work.groups.size(); ++m) {
    for (uint32_t i = 0; i < groups_[work.groups[m]].num_rows; ++i) {
      rows.push_back({m, work.groups[m], i});
    }
  }
  const bool large = IsLarge(rows.size());
  const uint32_t per_block = RowsPerBlock(large);
  const std::span<const Row> all = rows;
  // The last rows of a causal span see most: their blocks begin first.
  const size_t blocks = (rows.size() + per_block - 1) / per_block;
  for (size_t b = blocks; b-- > 0;) {
    const size_t first = b * per_block;
    AddBlock(
        work,
        all.subspan(first, std::min<size_t>(per_block, rows.size() - first)),
        large, splits);
  }
}

void Builder::AddBlock(const Work& work, std::span<const Row> rows, bool large,
                       uint32_t splits) {
  std::vector<uint32_t> ends;  // of each piece, the farthest row's
  uint32_t tiles = 0;
  for (const Piece& piece : work.pieces) {
    uint32_t end = 0;
    for (const Row& row : rows) {
      end = std::max(end, EndOf(piece.slots[row.member], row));
    }
    ends.push_back(end);
    tiles += (end + tile_ - 1) / tile_;
  }
  const uint32_t per_item =
      options_.batch_invariant
          ? AttentionPlan::kInvariantSplitTokens / tile_
          : std::max(kMinTilesPerItem, (tiles + splits - 1) / splits);
  uint32_t room = 0;  // tiles that the open item still takes
  for (size_t i = 0; i < work.pieces.size(); ++i) {
    if (options_.batch_invariant) room = 0;
    for (uint32_t first = 0; first < ends[i];) {
      if (room == 0) {
        BeginItem(large, rows);
        room = per_item;
      }
      const uint32_t end = std::min(ends[i], first + room * tile_);
      AddPart(work.pieces[i], rows, first, end);
      room -= (end - first + tile_ - 1) / tile_;
      first = end;
    }
  }
}

void Builder::BeginItem(bool large, std::span<const Row> rows) {
  items_.push_back({.large = large,
                    .first_part = static_cast<uint32_t>(parts_.size()),
                    .num_parts = 0,
                    .first_row = static_cast<uint32_t>(item_rows_.size()),
                    .num_rows = static_cast<uint32_t>(rows.size())});
  for (const Row& row : rows) {
    item_rows_.push_back(
        {.row = static_cast<int32_t>(groups_[row.group].first_row + row.index),
         .state = -1});
  }
}

void Builder::AddPart(const Piece& piece, std::span<const Row> rows,
                      uint32_t first, uint32_t end) {
  Item& item = items_.back();
  const uint32_t slot0 = piece.slots[rows[0].member];
  const KvView& view = ViewOf(rows[0].group, slot0);
  AttentionPart part = {.first_page = PagesOf(rows[0].group, slot0),
                        .first_slot = view.first_token % options_.page_tokens,
                        .first_token = first,
                        .end_token = end,
                        .first_row = static_cast<uint32_t>(part_rows_.size()),
                        .min_reach = INT32_MAX,
                        .local_position = view.local_position,
                        .position_offset = view.position_offset,
                        .same_frame = item.num_parts > 0 ? 1u : 0u};
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& row = rows[i];
    const uint32_t slot = piece.slots[row.member];
    const int32_t frame = groups_[row.group].position +
                          static_cast<int32_t>(row.index) -
                          ViewOf(row.group, slot).position_offset;
    const int32_t reach = ReachOf(slot, row);
    part.min_reach = std::min(part.min_reach, reach);
    if (item.num_parts > 0 &&
        part_rows_[parts_.back().first_row + i].frame_position != frame) {
      part.same_frame = 0;
    }
    part_rows_.push_back({.frame_position = frame,
                          .end_token = static_cast<int32_t>(EndOf(slot, row)),
                          .reach = reach});
    if (item.num_parts == 0) {
      uses_[groups_[row.group].first_row + row.index].push_back(
          {slot, first, item.first_row + static_cast<uint32_t>(i)});
    }
  }
  parts_.push_back(part);
  ++item.num_parts;
}

uint32_t Builder::PagesOf(uint32_t group, uint32_t slot) {
  uint32_t& known = pages_of_[group][slot];
  if (known != kNoPages) return known;
  known = static_cast<uint32_t>(pages_.size());
  const KvView& view = ViewOf(group, slot);
  const uint32_t last =
      (view.first_token + view.num_tokens - 1) / options_.page_tokens;
  pages_.insert(pages_.end(),
                view.pages + view.first_token / options_.page_tokens,
                view.pages + last + 1);
  return known;
}

// Rows that see nothing still have a result.
void Builder::AddEmptyRows() {
  std::vector<Row> empty;
  for (uint32_t g = 0; g < groups_.size(); ++g) {
    for (uint32_t i = 0; i < groups_[g].num_rows; ++i) {
      if (!uses_.contains(groups_[g].first_row + i)) empty.push_back({0, g, i});
    }
  }
  const uint32_t per_block = RowsPerBlock(/*large=*/true);
  const std::span<const Row> all = empty;
  for (size_t first = 0; first < empty.size(); first += per_block) {
    BeginItem(
        /*large=*/true,
        all.subspan(first, std::min<size_t>(per_block, empty.size() - first)));
  }
}

void Builder::AssignStates() {
  for (auto& [row, uses] : uses_) {
    if (uses.size() < 2) continue;
    std::sort(uses.begin(), uses.end(), [](const Use& a, const Use& b) {
      return std::pair(a.slot, a.token) < std::pair(b.slot, b.token);
    });
    merged_rows_.push_back({.row = row,
                            .first_state = num_states_,
                            .num_states = static_cast<uint32_t>(uses.size())});
    for (const Use& use : uses) {
      item_rows_[use.item_row].state = static_cast<int32_t>(num_states_++);
    }
  }
  std::vector<Item> ordered;  // the large ones first
  for (bool large : {true, false}) {
    for (const Item& item : items_) {
      if (item.large == large) ordered.push_back(item);
    }
  }
  items_ = std::move(ordered);
  for (const Item& item : items_) {
    ++(item.large ? grid_.large_items : grid_.small_items);
  }
  grid_.merged_rows = static_cast<uint32_t>(merged_rows_.size());
}

// Appends an array at a multiple of 16 bytes; where it lies.
template <class T>
uint32_t Append(const std::vector<T>& values, std::vector<std::byte>* bytes) {
  bytes->resize((bytes->size() + 15) / 16 * 16);
  const size_t at = bytes->size();
  bytes->resize(at + values.size() * sizeof(T));
  if (!values.empty()) {
    std::memcpy(bytes->data() + at, values.data(), values.size() * sizeof(T));
  }
  return static_cast<uint32_t>(at);
}

std::vector<std::byte> Builder::Bytes() const {
  std::vector<AttentionItem> items;
  items.reserve(items_.size());
  for (const Item& item : items_) {
    items.push_back(
        {item.first_part, item.num_parts, item.first_row, item.num_rows});
  }
  std::vector<std::byte> bytes(sizeof(AttentionPlanHeader));
  AttentionPlanHeader header = {.num_large_items = grid_.large_items,
                                .num_small_items = grid_.small_items,
                                .num_merged_rows = grid_.merged_rows};
  header.items = Append(items, &bytes);
  header.parts = Append(parts_, &bytes);
  header.item_rows = Append(item_rows_, &bytes);
  header.part_rows = Append(part_rows_, &bytes);
  header.merged_rows = Append(merged_rows_, &bytes);
  header.pages = Append(pages_, &bytes);
  std::memcpy(bytes.data(), &header, sizeof header);
  return bytes;
}

}  // namespace

void AttentionPlan::Build(const Options& options,
                          std::span<const AttentionGroup> groups) {
  Builder builder(options, groups);
  builder.Run();
  bytes_ = builder.Bytes();
  grid_ = builder.grid();
  state_bytes_ = size_t{builder.num_states()} * options.num_heads *
                 StateRowFloats(options.head_dim) * sizeof(float);
}

}  // namespace promptcache::gpu
