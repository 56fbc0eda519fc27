#pragma once
// A Python script in a process of its own, which is reached through a socket and may be silent only for a limited time.
// So hostile files can harm Python's libraries only there.
#include <sys/types.h>

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "runtime/base/files.h"

namespace tierflow {

class PythonProcess {
 public:
  struct Job {
    const char* script;                  // text of the script
    std::vector<std::string> arguments;  // after the script
    std::filesystem::path python;        // empty: python3
    std::string path;                    // for errors: the file or folder that the script works on
    std::string package;                 // the Python package that the script needs
    double patience;                     // seconds
  };

  // Throws Exception (kind environment) if Python cannot be started.
  explicit PythonProcess(Job job);
  PythonProcess(const PythonProcess&) = delete;
  PythonProcess& operator=(const PythonProcess&) = delete;
  // Stops the process if it still runs.
  ~PythonProcess();

  const std::string& python() const { return python_; }
  // From now on a counted signal does not end send() and receive(): what there is can still be asked for.
  void ignore_stops() { heeds_stops_ = false; }
  // Throws Stopped if a signal was counted, unless stops are ignored.
  void heed_stop() const;
  // All of the bytes. Throw Exception: where the script has ended, with its last line on standard error (input for its
  // exit status 3, else environment); input where it is silent for too long; Stopped.
  void send(std::span<const std::byte> bytes);
  void receive(std::span<std::byte> out);

 private:
  void start();
  void stop() noexcept;
  void wait_for(short events);
  [[noreturn]] void fail_ended();

  Job job_;
  std::string python_;
  pid_t process_ = -1;
  File socket_, errors_;
  bool heeds_stops_ = true;
};

}  // namespace tierflow
