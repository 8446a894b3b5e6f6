#include "zc/comm/missing_ranks.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace zc::comm {
namespace {

using std::filesystem::path;

// A list of processes as /proc has it.
class Processes {
 public:
  Processes() : folder_(path(testing::TempDir()) / ("zc-missing-ranks-" + std::to_string(getpid()))) {
    std::filesystem::create_directories(folder_ / "self");
  }
  ~Processes() { std::filesystem::remove_all(folder_); }

  // rank -1: none
  void add(int pid, int parent, int rank = -1, const std::string& command = "python", char state = 'S') {
    const path folder = folder_ / std::to_string(pid);
    std::filesystem::create_directories(folder);
    std::ofstream(folder / "stat") << pid << " (a ) b) " << state << " " << parent << " 1 1";
    std::ofstream(folder / "cmdline") << "python" << '\0' << command << '\0';
    std::ofstream environment(folder / "environ");
    environment << "OTHER=1" << '\0';
    if (rank >= 0) environment << "PMI_RANK=" << rank << '\0';
  }
  void end(int pid) { std::filesystem::remove_all(folder_ / std::to_string(pid)); }
  void hide(int pid) { std::filesystem::remove(folder_ / std::to_string(pid) / "environ"); }
  std::vector<int> missing(int own) const { return missing_ranks("PMI_RANK", 4, own, folder_); }

 private:
  path folder_;
};

TEST(MissingRanksTest, ARankIsThereAsLongAsOneOfItsProcessesIs) {
  Processes processes;
  processes.add(1, 0);
  processes.add(10, 1, -1, "hydra_pmi_proxy");
  processes.add(100, 10, 0);
  processes.add(110, 10, 1, "wrapper.sh");
  processes.add(111, 110, 1);
  processes.add(120, 10, 2);
  processes.add(130, 10, 3, "/p/zerocore/_launcher/shim.py");
  processes.add(131, 130, 3);
  const std::vector<int> none;
  EXPECT_EQ(processes.missing(100), none);
  EXPECT_EQ(processes.missing(131), none);

  processes.add(120, 10, 2, "python", 'Z');
  processes.add(121, 1, 2);  // left over by it
  EXPECT_EQ(processes.missing(100), std::vector<int>({2}));
  processes.end(131);  // only its shim is left
  processes.end(111);  // its wrapper is
  EXPECT_EQ(processes.missing(100), std::vector<int>({2, 3}));

  processes.add(20, 1, -1, "hydra_pmi_proxy");  // another job's
  processes.add(200, 20, 2);
  EXPECT_EQ(processes.missing(100), std::vector<int>({2, 3}));
  EXPECT_EQ(processes.missing(200), std::vector<int>({0, 1, 3}));
}

TEST(MissingRanksTest, NothingIsToldWhereProcessesCannotBeSeen) {
  Processes processes;
  processes.add(100, 10, 0);
  const std::vector<int> none;
  EXPECT_EQ(processes.missing(100), none);  // what is above is out of sight
  EXPECT_EQ(processes.missing(7), none);
  processes.add(10, 1);
  EXPECT_EQ(processes.missing(100), std::vector<int>({1, 2, 3}));
  processes.add(110, 10, 1);
  processes.hide(110);  // of another user
  EXPECT_EQ(processes.missing(100), none);
}

}  // namespace
}  // namespace zc::comm
