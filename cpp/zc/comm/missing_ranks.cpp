#include "zc/comm/missing_ranks.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <system_error>

#include "zc/base/error.h"

namespace zc::comm {
namespace {

// The launcher's shim has its rank's variables, and outlives the rank.
constexpr const char* kShim = "/zerocore/_launcher/shim.py";

struct Process {
  int parent = 0;
  bool readable = true;
  bool of_job = false;  // has the variables of a rank
  int rank = -1;        // -1: none, or a shim
};

std::optional<int> number(const std::string& text) {
  int value = 0;
  const auto end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, value);
  if (result.ec != std::errc{} || result.ptr != end) return std::nullopt;
  return value;
}

std::optional<std::string> read(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  return std::string(std::istreambuf_iterator<char>(file), {});
}

std::optional<Process> read_process(const std::filesystem::path& folder, const std::string& rank_variable) {
  const auto stat = read(folder / "stat");
  // The name, in brackets, may hold anything; " state parent ..." follow.
  const std::size_t name_end = stat ? stat->rfind(')') : std::string::npos;
  if (name_end == std::string::npos || stat->size() < name_end + 5) return std::nullopt;
  const char state = (*stat)[name_end + 2];
  const auto parent = number(stat->substr(name_end + 4, stat->find(' ', name_end + 4) - name_end - 4));
  if (!parent || state == 'Z' || state == 'X') return std::nullopt;
  Process process{.parent = *parent};
  const auto environment = read(folder / "environ");
  if (!environment) {
    process.readable = false;
    return process;
  }
  const std::string start = rank_variable + "=";
  for (std::size_t at = 0; at < environment->size();) {
    const std::string variable(environment->c_str() + at);
    at += variable.size() + 1;
    if (!variable.starts_with(start)) continue;
    process.of_job = true;
    const bool is_shim = read(folder / "cmdline").value_or("").find(kShim) != std::string::npos;
    if (!is_shim) process.rank = number(variable.substr(start.size())).value_or(-1);
    break;
  }
  return process;
}

// The nearest process above one that is none of a job; 0 where that is not to be seen.
int launcher_of(int pid, const std::map<int, Process>& processes) {
  for (auto it = processes.find(pid); it != processes.end();) {
    const auto above = processes.find(it->second.parent);
    if (above == processes.end()) return 0;
    if (!above->second.of_job) return above->first;
    it = above;
  }
  return 0;
}

}  // namespace

std::vector<int> missing_ranks(const std::string& rank_variable, int size, int own, const std::string& proc) {
  std::map<int, Process> processes;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(proc, error)) {
    const auto pid = number(entry.path().filename().string());
    if (!pid) continue;
    if (const auto process = read_process(entry.path(), rank_variable)) processes.emplace(*pid, *process);
  }
  const int launcher = launcher_of(own, processes);
  if (launcher == 0) return {};
  std::set<int> here;
  for (const auto& [pid, process] : processes) {
    if (process.parent == launcher && !process.readable) return {};
    if (process.rank >= 0 && launcher_of(pid, processes) == launcher) here.insert(process.rank);
  }
  std::vector<int> missing;
  for (int rank = 0; rank < size; ++rank) {
    if (!here.contains(rank)) missing.push_back(rank);
  }
  return missing;
}

std::function<std::string()> look_for_missing_ranks(std::string rank_variable, int size) {
  return [rank_variable = std::move(rank_variable), size, before = std::vector<int>{}]() mutable {
    const std::vector<int> now = missing_ranks(rank_variable, size, getpid());
    std::vector<int> both;
    std::ranges::set_intersection(now, before, std::back_inserter(both));
    before = now;
    if (both.empty()) return std::string();
    std::string ranks = both.size() > 1 ? "ranks " : "rank ";
    for (std::size_t i = 0; i < both.size(); ++i) ranks += concat(i > 0 ? ", " : "", both[i]);
    return concat("[comm] ", ranks, " ended before the job had started, while this rank waits for all of them. ",
                  "Every rank must build the same engines: look at the output of ", ranks,
                  " first, and for code that depends on the rank.");
  };
}

}  // namespace zc::comm
