// The smallest test harness that says what failed: TEST(name) { CHECK(...); } and run_tests().
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <vector>

namespace check {

struct Test {
  const char* name;
  std::string_view file;
  void (*body)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

inline bool add(const char* name, std::string_view file, void (*body)()) {
  tests().push_back({name, file, body});
  return true;
}

// Runs the tests of the source file `subject`.cpp, or of every file for an empty name. Returns the
// exit status of the program: a name that no file has is a failure.
inline int run_tests(std::string_view subject = {}) {
  std::size_t num_run = 0;
  for (const Test& test : tests()) {
    const std::string_view name = test.file.substr(test.file.rfind('/') + 1);
    if (!subject.empty() && name.substr(0, name.rfind('.')) != subject) continue;
    std::printf("%s\n", test.name);
    std::fflush(stdout);
    test.body();
    ++num_run;
  }
  return num_run > 0 ? 0 : 1;
}

}  // namespace check

#define TEST(name)                                                                      \
  static void name();                                                                   \
  [[maybe_unused]] static const bool name##_added = check::add(#name, __FILE__, &name); \
  static void name()

#define CHECK(condition)                                                             \
  do {                                                                               \
    if (!(condition)) {                                                              \
      std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                  \
    }                                                                                \
  } while (false)
