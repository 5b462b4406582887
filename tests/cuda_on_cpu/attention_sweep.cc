#include "attention_sweep.h"

#include <algorithm>
#include <cstddef>
#include <span>

#include "cuda/kernels/attention_format.h"

namespace promptcache::gpu {
namespace {

struct Point {
  uint32_t length, rows, heads_per_kv, views;
  size_t index;  // chooses what takes turns
};

constexpr int32_t kOffsets[] = {0, 700, -150, 64};

void SetPositions(const Point& point, AttentionCase* c) {
  switch (point.index % 8) {
    case 0:
    case 1:
      c->rope_pairs = c->head_dim / 2;
      break;
    case 2:
      c->rope_pairs = c->head_dim / 2;
      c->rope_interleaved = true;
      c->rope_factor = 1.1;
      break;
    case 3:
      c->rope_pairs = c->head_dim / 8;  // partial
      break;
    case 4:
      c->alibi = true;
      break;
    case 5:
      c->bias_reach = 50;
      break;
    case 6:
      c->rope_pairs = c->head_dim / 2;
      c->rotate_keys = true;
      c->rope_factor = 1.1;
      break;
    default:
      c->rope_pairs = c->head_dim / 4;
      c->rope_interleaved = true;
      break;
  }
  if (point.index % 3 == 1) c->window = 1 + point.length;
  if (point.index % 5 == 2) c->batch_invariant = true;
}

AttentionCase CaseAt(ElementType type, uint32_t head_dim, const Point& point) {
  AttentionCase c;
  c.type = type;
  c.head_dim = head_dim;
  c.num_kv_heads = 1 + point.index % 2;
  c.num_heads = c.num_kv_heads * point.heads_per_kv;
  c.page_tokens = point.index % 4 == 3 ? 8 : 16;
  c.num_multiprocessors = point.index % 2 == 0 ? 1 : 16;
  c.seed = static_cast<uint32_t>(point.index) + 1;
  GroupSpec group = {.num_rows = point.rows, .position = 500, .visible = {}};
  // Own tokens: none (cross-attention), these rows, or rows of passes before.
  group.own_tokens = point.index % 7 == 5   ? 0
                     : point.index % 2 == 0 ? point.rows
                                            : point.rows + point.length;
  for (uint32_t v = 0; v < point.views; ++v) {
    const auto i = static_cast<uint32_t>(point.index) + v;
    c.modules.push_back({.tokens = v == 0 ? point.length : point.length / 2 + v,
                         .first_slot = 5 * i,
                         .local_position = static_cast<int32_t>(i % 3 * 10)});
    group.visible.push_back({v, kOffsets[i % 4]});
  }
  c.groups = {group};
  SetPositions(point, &c);
  c.name = "length " + std::to_string(point.length) + ", rows " +
           std::to_string(point.rows) + ", heads " +
           std::to_string(c.num_heads) + "/" + std::to_string(c.num_kv_heads) +
           ", views " + std::to_string(point.views) + ", turn " +
           std::to_string(point.index);
  return c;
}

}  // namespace

std::vector<AttentionCase> SweepCases(ElementType type, uint32_t head_dim,
                                      bool full) {
  const uint32_t tile = AttentionTileTokens(head_dim);
  const uint32_t lengths[] = {0, 1, tile - 1, tile, tile + 1, 1000, 3001};
  constexpr uint32_t kRows[] = {1, 3, 17, 70, 130};
  constexpr uint32_t kHeads[] = {1, 2, 7, 4, 20};
  constexpr uint32_t kViews[] = {1, 3, 0, 10};
  std::vector<AttentionCase> cases;
  size_t index = 0;
  for (uint32_t length : std::span(lengths).first(full ? 7 : 6)) {
    for (uint32_t rows : std::span(kRows).first(full ? 5 : 4)) {
      for (size_t i = 0; i < (full ? 20 : 1); ++i) {
        const size_t turn = full ? i : index;
        Point point = {length, rows, kHeads[turn % 5], kViews[turn / 5 % 4],
                       index++};
        if (!full) point.views = kViews[turn % 4];
        cases.push_back(CaseAt(type, head_dim, point));
      }
    }
  }
  return cases;
}

std::vector<AttentionCase> QuickCases() {
  AttentionCase base;
  base.modules = {{100, 5, 0}, {64, 0, 0}, {33, 2, 7}};
  base.rope_pairs = 32;
  base.num_heads = 4;
  base.num_kv_heads = 2;
  std::vector<AttentionCase> cases;
  const auto add = [&](const char* name, std::vector<GroupSpec> groups,
                       auto change) {
    AttentionCase c = base;
    c.name = name;
    c.groups = std::move(groups);
    change(&c);
    cases.push_back(c);
  };
  const std::vector<ViewSpec> views = {{0, 0}, {1, 500}, {2, 40}};
  add("decode", {{1, 300, views, 9}},
      [](AttentionCase* c) { c->surplus_blocks = 3; });
  add("prefill", {{40, 300, views, 70}}, [](AttentionCase*) {});
  add("rotated keys", {{5, 300, views, 5}}, [](AttentionCase* c) {
    c->rotate_keys = true;
    c->rope_interleaved = true;
    c->rope_factor = 1.2;
  });
  add("window", {{40, 300, views, 40}}, [](AttentionCase* c) {
    c->window = 50;
    c->type = ElementType::kFp16;
  });
  // Rows of a warp that see nothing of a tile that others of it see.
  add("window over own tokens", {{90, 300, {{1, 500}}, 130}},
      [](AttentionCase* c) { c->window = 50; });
  add("ALiBi, fixed splits", {{12, 300, views, 12}}, [](AttentionCase* c) {
    c->alibi = true;
    c->rope_pairs = 0;
    c->batch_invariant = true;
  });
  add("distances, encoder's states", {{3, 20, {{0, 0}, {1, 0}}, 0}},
      [](AttentionCase* c) {
        c->bias_reach = 30;
        c->rope_pairs = 0;
      });
  // Two modules that three requests share at other places, and one row alone.
  add("shared",
      {{1, 300, {{0, 0}, {1, 500}}, 1},
       {1, 400, {{0, 7}, {1, 500}}, 12},
       {2, 100, {{2, 7}, {0, 500}, {1, 3}}, 2},
       {1, 5, {}, 0}},
      [](AttentionCase*) {});
  add("heads of 80", {{20, 300, views, 20}, {1, 300, views, 1}},
      [](AttentionCase* c) {
        c->head_dim = 80;
        c->rope_pairs = 16;
      });
  add("heads of 256", {{9, 300, views, 9}, {1, 300, views, 1}},
      [](AttentionCase* c) {
        c->head_dim = 256;
        c->num_heads = 2;
      });
  return cases;
}

}  // namespace promptcache::gpu
