#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <filesystem>
#include <optional>

#include "bindings.h"
#include "zc/ckpt/commit.h"
#include "zc/ckpt/reader.h"
#include "zc/ckpt/writer.h"
#include "zc/io/huge_buffer.h"

namespace py = pybind11;
namespace ckpt = zc::ckpt;
using NoGil = py::call_guard<py::gil_scoped_release>;
using Path = std::filesystem::path;

namespace {

using AddressAndBytes = std::pair<std::uintptr_t, std::int64_t>;
using OffsetBytesAddress = std::tuple<std::int64_t, std::int64_t, std::uintptr_t>;
using Hashes = std::vector<std::uint64_t>;

std::vector<ckpt::Segment> to_segments(const std::vector<AddressAndBytes>& pairs) {
  std::vector<ckpt::Segment> segments;
  for (const auto& [address, bytes] : pairs) segments.push_back({reinterpret_cast<const std::byte*>(address), bytes});
  return segments;
}

ckpt::Options to_options(std::uintptr_t hash, std::int64_t chunk_bytes, int num_threads) {
  return {reinterpret_cast<ckpt::HashFn>(hash), chunk_bytes, num_threads};
}

Hashes write_file(const Path& path, const std::vector<AddressAndBytes>& segments, std::uintptr_t hash,
                  std::int64_t chunk_bytes, int num_threads) {
  return ckpt::write_file(path, to_segments(segments), to_options(hash, chunk_bytes, num_threads));
}

void read_ranges(const Path& path, std::int64_t file_bytes, const Hashes& hashes,
                 const std::vector<OffsetBytesAddress>& tuples, std::uintptr_t hash, std::int64_t chunk_bytes,
                 int num_threads) {
  std::vector<ckpt::Range> ranges;
  for (const auto& [offset, bytes, address] : tuples) {
    ranges.push_back({offset, bytes, reinterpret_cast<std::byte*>(address)});
  }
  ckpt::read_ranges(path, file_bytes, hashes, ranges, to_options(hash, chunk_bytes, num_threads));
}

void verify_file(const Path& path, std::int64_t file_bytes, const Hashes& hashes, std::uintptr_t hash,
                 std::int64_t chunk_bytes, int num_threads) {
  ckpt::verify_file(path, file_bytes, hashes, to_options(hash, chunk_bytes, num_threads));
}

}  // namespace

// Addresses are integers: of host memory that the caller keeps alive, and of a function (ckpt::HashFn).
void bind_ckpt(py::module_& m) {
  const ckpt::Options defaults;
  const auto chunk_bytes = py::arg("chunk_bytes") = defaults.chunk_bytes;
  const auto num_threads = py::arg("num_threads") = defaults.num_threads;

  py::class_<zc::io::HugeBuffer>(m, "HugeBuffer", py::buffer_protocol(), "Host memory on huge pages, mapped at once.")
      .def(py::init<std::int64_t>(), NoGil(), py::arg("bytes"))
      .def_property_readonly(
          "address", [](const zc::io::HugeBuffer& self) { return reinterpret_cast<std::uintptr_t>(self.data()); })
      .def_property_readonly("bytes", &zc::io::HugeBuffer::bytes)
      .def_buffer([](zc::io::HugeBuffer& self) {
        return py::buffer_info(reinterpret_cast<unsigned char*>(self.data()), self.bytes());
      });

  m.def("write_file", &write_file, NoGil(), py::arg("path"), py::arg("segments"), py::kw_only(), py::arg("hash"),
        chunk_bytes, num_threads, "Writes [(address, bytes)] to a new file, durably. Returns the chunks' hashes.");
  m.def("read_ranges", &read_ranges, NoGil(), py::arg("path"), py::arg("file_bytes"), py::arg("hashes"),
        py::arg("ranges"), py::kw_only(), py::arg("hash"), chunk_bytes, num_threads,
        "Reads [(offset, bytes, address)] and verifies the chunks that they touch.");
  m.def("verify_file", &verify_file, NoGil(), py::arg("path"), py::arg("file_bytes"), py::arg("hashes"), py::kw_only(),
        py::arg("hash"), chunk_bytes, num_threads, "Verifies all chunks of a file.");
  m.def(
      "copy_segments",
      [](const std::vector<AddressAndBytes>& segments, std::uintptr_t to, int threads) {
        ckpt::copy_segments(to_segments(segments), reinterpret_cast<std::byte*>(to), threads);
      },
      NoGil(), py::arg("segments"), py::arg("to"), py::kw_only(), py::arg("num_threads") = 0,
      "Copies [(address, bytes)], one after the other, to an address. num_threads 0: one a core.");

  m.def(
      "write_new_file", [](const Path& path, std::string_view data) { ckpt::write_new_file(path, data); }, NoGil(),
      py::arg("path"), py::arg("data"), "A new small file, its bytes on the disk; its entry in the folder is not yet.");
  m.def(
      "replace_file", [](const Path& path, std::string_view data) { ckpt::replace_file(path, data); }, NoGil(),
      py::arg("path"), py::arg("data"), "Replaces a small file, atomically and durably.");
  m.def(
      "sync_folder", [](const Path& path) { ckpt::sync_folder(path); }, NoGil(), py::arg("path"),
      "The entries of a folder are on the disk.");
  m.def(
      "commit_folder",
      [](const Path& from, const Path& to) {
        const std::string old = ckpt::commit_folder(from, to);
        return old.empty() ? std::nullopt : std::optional<Path>(old);
      },
      NoGil(), py::arg("source"), py::arg("to"),
      "Renames a folder, durably; where `to` exists the two change places. Returns where the old one then lies.");
}
