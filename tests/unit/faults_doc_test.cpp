// docs/faults.md is honest: every fault from F01 to F33 has one row, and every test that a row names is in the file
// that it names.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <map>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

namespace moed {
namespace {

constexpr int kFaults = 33;

std::string read(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

/// The cells of a row of a table, without spaces around them.
std::vector<std::string> cells_of(const std::string& line) {
  std::vector<std::string> cells;
  std::stringstream row(line);
  std::string cell;
  std::getline(row, cell, '|');  // before the first bar
  while (std::getline(row, cell, '|')) {
    const size_t first = cell.find_first_not_of(' ');
    cells.push_back(first == std::string::npos ? "" : cell.substr(first, cell.find_last_not_of(' ') - first + 1));
  }
  return cells;
}

/// Whether `source` defines the test Suite.Name.
bool defines(const std::string& source, const std::string& suite, const std::string& name) {
  return std::regex_search(source, std::regex("\\nTEST(_F|_P)?\\(" + suite + ", " + name + "\\)"));
}

/// What is wrong with one row: `cells` of fault number, report, what moed does, tests, what is open.
std::vector<std::string> faults_of_row(const std::vector<std::string>& cells) {
  if (cells.size() != 5) return {"it has " + std::to_string(cells.size()) + " cells, not 5"};
  std::vector<std::string> faults;
  for (size_t i = 0; i < cells.size(); ++i)
    if (cells[i].empty()) faults.push_back("cell " + std::to_string(i + 1) + " is empty");
  static const std::regex kFile("`(unit|parity|system)/(\\w+): ([^`]+)`");
  static const std::regex kTest("(\\w+)\\.(\\w+)");
  const std::string& tests = cells[3];
  size_t named = 0;
  for (std::sregex_iterator file(tests.begin(), tests.end(), kFile), end; file != end; ++file) {
    std::string path = (*file)[1].str() + "/" + (*file)[2].str() + ".cpp";
    std::string source = read(std::string(MOED_SOURCE) + "/tests/" + path);
    if (source.empty()) {  // tests with kernels of their own
      const std::string other = path.substr(0, path.size() - 3) + "cu";
      source = read(std::string(MOED_SOURCE) + "/tests/" + other);
      if (!source.empty()) path = other;
    }
    if (source.empty()) faults.push_back("there is no tests/" + path);
    const std::string list = (*file)[3];
    for (std::sregex_iterator test(list.begin(), list.end(), kTest); test != end; ++test, ++named)
      if (!defines(source, (*test)[1], (*test)[2])) faults.push_back("tests/" + path + " has no " + test->str());
  }
  if (named == 0) faults.emplace_back("it names no test");
  const auto quoted = std::count(tests.begin(), tests.end(), '`') / 2;
  const auto files = std::distance(std::sregex_iterator(tests.begin(), tests.end(), kFile), std::sregex_iterator());
  if (quoted != files) faults.emplace_back("something quoted is not FOLDER/FILE: SUITE.NAME");
  return faults;
}

/// Everything that is wrong with a page; empty: nothing.
std::vector<std::string> faults_of(const std::string& page) {
  std::vector<std::string> faults;
  std::map<std::string, int> rows;
  std::stringstream lines(page);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("| F")) continue;
    const std::vector<std::string> cells = cells_of(line);
    ++rows[cells[0]];
    for (const std::string& fault : faults_of_row(cells)) faults.push_back(cells[0] + ": " + fault);
  }
  for (int f = 1; f <= kFaults; ++f) {
    const std::string number = (f < 10 ? "F0" : "F") + std::to_string(f);
    if (rows[number] != 1) faults.push_back(number + " has " + std::to_string(rows[number]) + " rows");
  }
  if (rows.size() != kFaults) faults.emplace_back("there is a row that is no fault from F01 to F33");
  return faults;
}

std::string text(const std::vector<std::string>& lines) {
  std::string all;
  for (const std::string& line : lines) all += line + "\n";
  return all;
}

std::string page() { return read(std::string(MOED_SOURCE) + "/docs/faults.md"); }

TEST(FaultsDocument, NamesEveryFaultOnceAndTestsThatExist) { EXPECT_EQ(text(faults_of(page())), ""); }

/// The check itself finds what is wrong.
TEST(FaultsDocument, AWrongPageIsFound) {
  const std::string good = page();
  const size_t row = good.find("| F07 |");
  const std::string line = good.substr(row, good.find('\n', row) + 1 - row);
  const auto with = [&](const std::string& other) { return std::string(good).replace(row, line.size(), other); };
  EXPECT_EQ(text(faults_of(with(""))), "F07 has 0 rows\n");
  EXPECT_EQ(text(faults_of(with(line + line))), "F07 has 2 rows\n");
  const std::string head = "| F07 | a | b | ";
  EXPECT_EQ(text(faults_of(with(head + "`system/calls_test: Calls.NoSuchTest` | - |\n"))),
            "F07: tests/system/calls_test.cpp has no Calls.NoSuchTest\n");
  EXPECT_EQ(text(faults_of(with(head + "`system/no_test: Calls.NoTokens` | - |\n"))),
            "F07: there is no tests/system/no_test.cpp\nF07: tests/system/no_test.cpp has no Calls.NoTokens\n");
  EXPECT_EQ(text(faults_of(with(head + "none | - |\n"))), "F07: it names no test\n");
  EXPECT_EQ(text(faults_of(with(head + "`system/calls_test: Calls.NoTokens`, `Calls.NoTokens` | - |\n"))),
            "F07: something quoted is not FOLDER/FILE: SUITE.NAME\n");
  EXPECT_EQ(text(faults_of(with(head + "`system/calls_test: Calls.NoTokens` | |\n"))), "F07: cell 5 is empty\n");
  EXPECT_EQ(text(faults_of(good + "| F34 | a | b | `system/calls_test: Calls.NoTokens` | - |\n")),
            "there is a row that is no fault from F01 to F33\n");
}

}  // namespace
}  // namespace moed
