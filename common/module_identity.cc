#include "common/module_identity.h"

namespace promptcache {

std::string_view IdentityFieldName(IdentityField field) {
  switch (field) {
    case IdentityField::kNone:
      return "none";
    case IdentityField::kModel:
      return "model";
    case IdentityField::kTokenizer:
      return "tokenizer";
    case IdentityField::kLayout:
      return "layout";
    case IdentityField::kIsolationDomain:
      return "isolation_domain";
    case IdentityField::kContext:
      return "context";
    case IdentityField::kPieces:
      return "pieces";
    case IdentityField::kStart:
      return "start";
  }
  return "?";
}

}  // namespace promptcache
