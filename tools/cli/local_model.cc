#include "tools/cli/local_model.h"

#include "common/status_macros.h"
#include "inference_worker/model/model_file.h"
#include "inference_worker/tokenizer/bpe_tokenizer.h"
#include "tools/cli/files.h"

namespace promptcache::cli {

absl::StatusOr<LocalVocabulary> LoadVocabulary(
    const std::string& model, const std::string& template_name) {
  PC_ASSIGN_OR_RETURN(const std::string path, FindModel(model));
  PC_ASSIGN_OR_RETURN(auto file,
                      worker::OpenModelFile(path, {.vocabulary_only = true}));
  LocalVocabulary out;
  PC_ASSIGN_OR_RETURN(out.tokenizer, worker::CreateTokenizer(*file));
  if (!template_name.empty()) {
    PC_ASSIGN_OR_RETURN(out.chat_template,
                        ChatTemplate::FromName(template_name));
  } else if (file->chat_template().empty()) {
    // A file without a template is a base model: messages are plain text.
    PC_ASSIGN_OR_RETURN(out.chat_template, ChatTemplate::FromName("plain"));
  } else {
    PC_ASSIGN_OR_RETURN(out.chat_template,
                        ChatTemplate::FromJinja(file->chat_template()));
  }
  out.context_length = static_cast<int32_t>(file->config().context_length);
  return out;
}

}  // namespace promptcache::cli
