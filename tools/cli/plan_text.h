#pragma once

#include <google/protobuf/repeated_ptr_field.h>

#include <string>

#include "promptcache/v1/inference.pb.h"

namespace promptcache::cli {

// A plan as a server tells it: one line a span.
std::string PlanText(
    const google::protobuf::RepeatedPtrField<v1::SpanSummary>& spans);

}  // namespace promptcache::cli
