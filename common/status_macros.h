#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

// Propagation of errors. The only two macros of the project.

// Returns from the enclosing function when `expr` is not OK.
#define PC_RETURN_IF_ERROR(expr)                                              \
  do {                                                                        \
    if (::absl::Status pc_status = (expr); !pc_status.ok()) return pc_status; \
  } while (false)

#define PC_CONCAT_INNER(a, b) a##b
#define PC_CONCAT(a, b) PC_CONCAT_INNER(a, b)

// `PC_ASSIGN_OR_RETURN(auto x, MakeX());`
#define PC_ASSIGN_OR_RETURN(lhs, expr) \
  PC_ASSIGN_OR_RETURN_IMPL(PC_CONCAT(pc_statusor_, __LINE__), lhs, expr)
#define PC_ASSIGN_OR_RETURN_IMPL(tmp, lhs, expr) \
  auto tmp = (expr);                             \
  if (!tmp.ok()) return std::move(tmp).status(); \
  lhs = std::move(tmp).value()
