#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/digest.h"

namespace promptcache::pml {

enum class Layout { kCompact, kSchema };
enum class Exactness { kExact, kModular };

// A module's own tokens between two of its params or children: consecutive
// positions from `offset`, counted from the module's origin (where it begins).
struct Piece {
  int32_t offset = 0;
  std::vector<int32_t> tokens;

  friend bool operator==(const Piece&, const Piece&) = default;
};

// One thing that a module's tokens were encoded seeing and that is not the
// module's own: states of another module, or a scaffold text standing in a
// param's slot. Positions are relative to the origin of the module that sees
// it (negative: before it).
struct ContextItem {
  // Index into Plan::modules of the states seen, or -1 for a scaffold text.
  int32_t module = -1;
  // States: tokens [first_token, first_token + num_tokens) of that module's
  // pieces taken together, in order. Always a prefix-closed set: all of them
  // see only what stands before.
  int32_t first_token = 0;
  int32_t num_tokens = 0;
  // States: where the *origin* of the module seen stands.
  // Scaffold text: where its first token stands.
  int32_t offset = 0;
  // Scaffold text only. Its states are computed anew, seeing every item before
  // it in the list, and thrown away.
  std::vector<int32_t> tokens;
};

// What a module saw, in order. A value; copies share the items, and a list may
// be the beginning of another one: a prefix chain, each of whose modules saw
// all before it, has one item a module and not one a pair of them.
// Thread-compatible.
class ContextList {
 public:
  ContextList() = default;
  // NOLINTNEXTLINE(google-explicit-constructor): it is written as one.
  ContextList(std::vector<ContextItem> items)
      : items_(
            std::make_shared<const std::vector<ContextItem>>(std::move(items))),
        size_(items_->size()) {}
  ContextList(std::initializer_list<ContextItem> items)
      : ContextList(std::vector<ContextItem>(items)) {}
  ContextList(const ContextList&) = default;
  ContextList& operator=(const ContextList&) = default;
  ContextList(ContextList&& other) noexcept
      : items_(std::move(other.items_)), size_(std::exchange(other.size_, 0)) {}
  ContextList& operator=(ContextList&& other) noexcept {
    items_ = std::move(other.items_);
    size_ = std::exchange(other.size_, 0);
    return *this;
  }

  // The first `count`, sharing them. REQUIRES: there are so many.
  ContextList First(size_t count) const {
    ContextList first = *this;
    first.size_ = count;
    return first;
  }
  const ContextItem* begin() const {
    return empty() ? nullptr : items_->data();
  }
  const ContextItem* end() const { return begin() + size_; }
  const ContextItem& operator[](size_t i) const { return (*items_)[i]; }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  void clear() { *this = ContextList(); }
  // A copy of the items, to make another list of.
  std::vector<ContextItem> Copy() const { return {begin(), end()}; }

 private:
  std::shared_ptr<const std::vector<ContextItem>> items_;
  size_t size_ = 0;
};

// Goes through several modules' contexts, and through what lists share once.
class ContextWalk {
 public:
  // Of the list's items those that it did not share with the list before.
  std::span<const ContextItem> New(const ContextList& list) {
    const size_t known = list.begin() == begin_ ? size_ : 0;
    begin_ = list.begin();
    size_ = std::max(known, list.size());
    if (known >= list.size()) return {};
    return std::span(list.begin(), list.end()).subspan(known);
  }

 private:
  const ContextItem* begin_ = nullptr;
  size_t size_ = 0;
};

// A module's cacheable states and all that is needed to compute them.
// Encoding runs the module's pieces and its own params' scaffold texts as one
// causal sequence in order of offset, at positions = offset, seeing `context`
// (in list order) in full. States of placeholders are not kept.
struct PlanModule {
  std::string path;                   // "" preamble, "#1" anonymous, "a/b"
  std::vector<std::string> scaffold;  // members, when co-encoded; else empty
  ContextList context;
  std::vector<Piece> pieces;        // never empty in total; offsets ascend
  std::vector<Piece> placeholders;  // scaffold texts of own params
  // Room from the origin to the end, params and children included.
  int32_t length = 0;
  // Start in the schema's layout: part of the key for absolute positions only.
  int32_t schema_start = 0;
  // SHA-256 of the module's own text (pieces joined), for the registry.
  Digest text_sha256;

  int32_t num_tokens() const {
    size_t n = 0;
    for (const Piece& p : pieces) n += p.tokens.size();
    return static_cast<int32_t>(n);
  }
};

enum class SpanKind { kCached, kFresh };

// Consecutive tokens of the plan at consecutive positions from `start`.
struct PlanSpan {
  SpanKind kind = SpanKind::kFresh;
  // As the vectors name it: module path; "" for the preamble (cached) or the
  // prompt's own text (fresh); "path.param" for an argument; a module with
  // cache="false" is a fresh span with its path.
  std::string name;
  // Cached: which states. index into Plan::modules, and the piece of it.
  int32_t module = -1;
  int32_t piece = -1;
  int32_t start = 0;  // position of the first token
  std::vector<int32_t> tokens;

  int32_t num_tokens() const { return static_cast<int32_t>(tokens.size()); }
};

// A compiled prompt: spans in plan order, at the places that LANGUAGE.md
// ("Positions") says; a fresh token sees every span before its own in full, and
// its own causally.
// Immutable once made; shared between requests.
struct Plan {
  std::string schema;
  std::vector<PlanSpan> spans;  // never one without tokens
  // States that the spans name or that another module's context names. A
  // context names only modules of lower index.
  std::vector<PlanModule> modules;
  // modules[i] that some span uses; others are there as context only.
  Exactness exactness = Exactness::kModular;
  Layout layout = Layout::kCompact;
  int32_t num_tokens = 0;         // of all spans
  int32_t num_cached_tokens = 0;  // of cached spans
  // Where decoding goes on: one after the highest position used.
  int32_t next_position = 0;
};

}  // namespace promptcache::pml
