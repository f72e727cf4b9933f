// The one program of these tests: `io_tests block_test` runs the tests of block_test.cpp.
#include "check.h"

int main(int argc, char** argv) { return check::run_tests(argc > 1 ? argv[1] : ""); }
