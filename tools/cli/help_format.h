#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace promptcache::cli {

// CLI11's help, with descriptions wrapped to the width of a terminal, and for
// subcommands a line about the options that all commands take.
class HelpFormatter : public CLI::Formatter {
 public:
  HelpFormatter();
  std::string make_description(const CLI::App* app) const override;
  std::string make_footer(const CLI::App* app) const override;
  std::string make_option_desc(const CLI::Option* option) const override;
  std::string make_subcommand(const CLI::App* command) const override;
};

}  // namespace promptcache::cli
