#include "tools/cli/help_format.h"

#include "tools/cli/terminal.h"

namespace promptcache::cli {
namespace {

constexpr size_t kNameColumns = 26;

// Wraps to what is left beside the column of names.
std::string WrapBeside(const std::string& text) {
  std::string wrapped = Wrap(text, std::string(kNameColumns, ' '));
  // CLI11 indents every line itself.
  std::string out;
  for (size_t begin = 0; begin < wrapped.size();) {
    const size_t end = wrapped.find('\n', begin);
    if (!out.empty()) out += '\n';
    out += wrapped.substr(begin + kNameColumns, end - begin - kNameColumns);
    begin = end + 1;
  }
  return out;
}

}  // namespace

HelpFormatter::HelpFormatter() { column_width(kNameColumns); }

std::string HelpFormatter::make_description(const CLI::App* app) const {
  // The first line alone is wrapped: what follows is laid out already.
  const std::string text = app->get_description();
  const size_t end = text.find('\n');
  return Wrap(text.substr(0, end), "") +
         (end == std::string::npos ? "" : text.substr(end + 1) + "\n");
}

std::string HelpFormatter::make_footer(const CLI::App* app) const {
  std::string footer = CLI::Formatter::make_footer(app);
  if (app->get_parent() != nullptr) {
    footer +=
        "\nEvery command takes --json, --worker HOST:PORT, --daemon HOST:PORT "
        "and\n--connect-timeout SECONDS; promptcache --help says more.\n";
  }
  return footer;
}

std::string HelpFormatter::make_option_desc(const CLI::Option* option) const {
  return WrapBeside(CLI::Formatter::make_option_desc(option));
}

std::string HelpFormatter::make_subcommand(const CLI::App* command) const {
  std::string out = "  " + command->get_name();
  out.resize(std::max(kNameColumns, out.size() + 1), ' ');
  std::string text = WrapBeside(command->get_description());
  for (size_t i = 0; (i = text.find('\n', i)) != std::string::npos;) {
    text.insert(i + 1, std::string(kNameColumns, ' ').c_str());
    i += kNameColumns;
  }
  return out + text + "\n";
}

}  // namespace promptcache::cli
