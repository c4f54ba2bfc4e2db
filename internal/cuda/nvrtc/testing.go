package nvrtc

import (
	"os"
	"path/filepath"
)

// Skipper is a test.
type Skipper interface {
	Helper()
	Skipf(format string, args ...any)
	Setenv(name, value string)
}

// ForTest returns the machine's compiler, or the one that kernels/build has fetched, and makes it that of [Load] while the test
// runs. Without a compiler ForTest ends the test.
func ForTest(t Skipper) *Compiler {
	t.Helper()
	if cache, err := os.UserCacheDir(); err == nil && os.Getenv(Variable) == "" {
		if found, err := filepath.Glob(filepath.Join(cache, "leanattention", "nvrtc-*", "lib")); err == nil && len(found) > 0 {
			t.Setenv(Variable, found[0])
		}
	}
	c, err := Load()
	if err != nil {
		t.Skipf("%v; go -C kernels/build run . -fetch", err)
	}
	return c
}
