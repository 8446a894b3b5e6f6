// The steps that make a checkpoint appear at once and for good.
#pragma once

#include <string>
#include <string_view>

namespace zc::ckpt {

// All of these throw kIo, block, and may be called from any thread.

// A new file with these bytes, on the disk on return; its entry in the folder is not (sync_folder). EEXIST when there
// is something at `path`; after any other failure there is nothing.
void write_new_file(const std::string& path, std::string_view data);

// `path` then holds these bytes, on the disk; at every instant, whatever dies, it holds the old ones or the new ones.
// "<path>.new" beside it is used, and removed first when a killed process left it there.
void replace_file(const std::string& path, std::string_view data);

// The entries of the folder are on the disk.
void sync_folder(const std::string& path);

// Gives the folder `from` the name `to`, on the disk; both have the same parent. `from`'s own entries are synced first;
// the files in it must be synced already.
//
// Where there is a folder `to` the two change places in one step, and the old one's path is returned (it is `from`),
// for the caller to remove. Some file systems (NFS) cannot exchange: there `to` is moved to "<from>.replaced" first,
// which must not exist, and that path is returned. Between the two renames nothing is called `to`: whoever finds that
// so takes
// "<from>.replaced". When there was no `to` the result is empty. When the last
// step fails, the sync of the parent, `to` is the new folder already, and may be the old one after a power cut.
std::string commit_folder(const std::string& from, const std::string& to);

}  // namespace zc::ckpt
