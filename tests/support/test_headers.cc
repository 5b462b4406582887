// Owns the precompiled headers of the tests: tests/support/CMakeLists.txt.
int main() { return 0; }
