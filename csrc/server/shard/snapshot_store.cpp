#include "server/shard/snapshot_store.h"

#include "checkpoint/folder_claim.h"

namespace muster::server {

namespace {

class SnapshotFolder final : public SnapshotStore {
 public:
  explicit SnapshotFolder(const std::filesystem::path& folder) : claim_(folder) {}

  uint64_t life() const override { return claim_.life(); }

  std::vector<Entry> list() const override {
    std::vector<Entry> entries;
    for (auto& info : checkpoint::list_snapshots(claim_.folder())) {
      entries.push_back({info.folder.filename().string(), std::move(info.metadata)});
    }
    return entries;
  }

  void read(const std::string& name, const Give& give) const override {
    checkpoint::SnapshotReader reader(claim_.folder() / name);
    uint64_t done = 0;
    while (const auto tensors = reader.next()) {
      give(*tensors, done, reader.bytes());
      done = reader.bytes_read();
    }
  }

  std::string write(const checkpoint::Metadata& metadata, const checkpoint::NextTensors& next,
                    const checkpoint::SnapshotOptions& options) override {
    const auto check = [&] { tried_again(options, [&] { claim_.check(); }); };
    check();
    auto in_it = options;
    in_it.makes_folder = false;  // one that has gone since would be made anew, in the way of who brings it back
    in_it.try_again = [&](const Error& error) {
      if (!options.try_again || !options.try_again(error)) return false;
      check();
      return true;
    };
    return checkpoint::write_snapshot(claim_.folder(), metadata, next, in_it).filename().string();
  }

  void remove(const std::string& name) override { checkpoint::remove_snapshot(claim_.folder() / name); }

  std::string where() const override { return '\'' + claim_.folder().string() + '\''; }

 private:
  const checkpoint::FolderClaim claim_;
};

}  // namespace

std::unique_ptr<SnapshotStore> open_snapshot_folder(const std::filesystem::path& folder) {
  return std::make_unique<SnapshotFolder>(folder);
}

}  // namespace muster::server
