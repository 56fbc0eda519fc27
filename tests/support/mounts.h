#pragma once
// Real file systems for tests that run as root: a small ext4 on a loop device, and ramfs. Where the machine does not
// allow them the object is not ready, and the test skips itself.
#include <fcntl.h>
#include <linux/fs.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>

namespace tierflow::testing {

// Runs a shell command; its first line of output, or "!" where it failed.
inline std::string shell(const std::string& command) {
  std::FILE* pipe = popen((command + " 2>/dev/null").c_str(), "r");
  if (pipe == nullptr) return "!";
  std::array<char, 256> line{};
  const bool any = std::fgets(line.data(), line.size(), pipe) != nullptr;
  if (pclose(pipe) != 0) return "!";
  std::string text = any ? line.data() : "";
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

// An ext4 on a loop device with sectors of `sector` bytes, mounted as `folder`/mount.
class LoopDisk {
 public:
  // On an image of `bytes` in `folder`.
  LoopDisk(const std::filesystem::path& folder, std::uint64_t bytes, unsigned sector = 512)
      : image_(folder / "image"), mount_(folder / "mount") {
    if (geteuid() != 0) return;
    std::ofstream(image_).close();
    std::filesystem::resize_file(image_, bytes);
    attach(sector);
  }
  // On an image that is there; formatted: it holds the file system already.
  LoopDisk(const std::filesystem::path& folder, const std::filesystem::path& image, bool formatted = false)
      : image_(image), mount_(folder / "mount") {
    if (geteuid() == 0 && std::filesystem::exists(image_)) attach(512, formatted);
  }
  ~LoopDisk() {
    thaw();
    if (ready_)
      umount2(mount_.c_str(), MNT_DETACH);
    else if (!device_.empty())
      shell("losetup --detach " + device_);
  }
  LoopDisk(const LoopDisk&) = delete;
  LoopDisk& operator=(const LoopDisk&) = delete;

  bool ready() const { return ready_; }
  const std::filesystem::path& path() const { return mount_; }
  std::string name() const { return device_.substr(device_.rfind('/') + 1); }  // "loop3"

  // The medium is gone from here on: reads and writes beyond `bytes` fail with EIO.
  void lose_medium(std::uint64_t bytes) {
    std::filesystem::resize_file(image_, bytes);
    const int descriptor = ::open(device_.c_str(), O_RDONLY | O_CLOEXEC);
    if (descriptor >= 0) close(descriptor);
  }
  // Writes wait until thaw(), or until this process ends, however it does: nobody could kill what waits for ever.
  bool freeze() {
    std::array<int, 2> ends{};
    const int folder = ::open(mount_.c_str(), O_RDONLY | O_CLOEXEC);
    if (folder < 0 || pipe2(ends.data(), O_CLOEXEC) != 0) return false;
    guard_ = fork();
    if (guard_ == 0) {
      setsid();  // what ends the test's process group leaves it alone
      // Where one of its threads waits for the frozen drive, a killed process keeps the pipe open: the signal tells
      // then.
      struct sigaction interrupts {};
      interrupts.sa_handler = [](int) {};
      sigaction(SIGUSR1, &interrupts, nullptr);
      prctl(PR_SET_PDEATHSIG, SIGUSR1);
      close(ends[1]);
      char none;
      (void)!read(ends[0], &none, 1);
      ioctl(folder, FITHAW, 0);
      _exit(0);
    }
    close(ends[0]);
    alive_ = ends[1];
    const bool done = ioctl(folder, FIFREEZE, 0) == 0;
    close(folder);
    if (!done) thaw();
    return done;
  }
  bool thaw() {
    if (alive_ < 0) return false;
    close(std::exchange(alive_, -1));
    int status = 0;
    return waitpid(guard_, &status, 0) == guard_;
  }

 private:
  void attach(unsigned sector, bool formatted = false) {
    std::filesystem::create_directory(mount_);
    device_ =
        shell("losetup --find --show --direct-io=on --sector-size " + std::to_string(sector) + " " + image_.string());
    if (device_ == "!" || device_.empty()) {
      device_.clear();
      return;
    }
    if (!formatted && shell("mkfs.ext4 -q -F -E lazy_itable_init=0 " + device_) == "!") return;
    ready_ = ::mount(device_.c_str(), mount_.c_str(), "ext4", 0, nullptr) == 0;
    if (ready_) shell("losetup --detach " + device_);  // when the mount goes, by whatever end
  }

  std::filesystem::path image_;
  std::filesystem::path mount_;
  std::string device_;
  bool ready_ = false;
  pid_t guard_ = -1;  // thaws
  int alive_ = -1;    // closed when this process ends
};

// A file system of a kind that needs no device ("ramfs", "tmpfs", "overlay"), mounted below `folder`.
class PlainMount {
 public:
  PlainMount(const std::filesystem::path& folder, const std::string& kind) : path_(folder / kind) {
    std::string options = "mode=700";
    std::filesystem::create_directory(path_);
    if (kind == "overlay") {
      for (const char* part : {"lower", "upper", "work"}) std::filesystem::create_directory(folder / part);
      options = "lowerdir=" + (folder / "lower").string() + ",upperdir=" + (folder / "upper").string() +
                ",workdir=" + (folder / "work").string();
    }
    ready_ = geteuid() == 0 && ::mount("none", path_.c_str(), kind.c_str(), 0, options.c_str()) == 0;
  }
  ~PlainMount() {
    if (ready_) umount2(path_.c_str(), MNT_DETACH);
  }
  PlainMount(const PlainMount&) = delete;
  PlainMount& operator=(const PlainMount&) = delete;

  bool ready() const { return ready_; }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  bool ready_ = false;
};

}  // namespace tierflow::testing
