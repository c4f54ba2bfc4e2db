package memory

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestUnderLimit: free bytes under a limit can be allocated, bytes that Check refuses are an error, and
// garbage can be allocated again. A child process runs the test, since Go ends a process at the limit.
func TestUnderLimit(t *testing.T) {
	const which = "LEANATTENTION_TEST_LIMIT"
	limits := map[string]struct {
		resource int
		used, of string
	}{
		"v": {unix.RLIMIT_AS, "VmSize:", "address space"},
		"d": {unix.RLIMIT_DATA, "VmData:", "data"},
	}
	l, child := limits[os.Getenv(which)]
	if !child {
		for name := range limits {
			c := exec.Command(os.Args[0], "-test.run=^TestUnderLimit$", "-test.v")
			c.Env = append(os.Environ(), which+"="+name)
			if out, err := c.CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS") {
				t.Errorf("ulimit -%s: %v\n%.4000s", name, err, out)
			}
		}
		return
	}
	used := fields(os.DirFS("/").(fs.ReadFileFS), "proc/self/status")[l.used] << 10
	if err := unix.Setrlimit(l.resource, &unix.Rlimit{Cur: uint64(used) + 700<<20, Max: unix.RLIM_INFINITY}); err != nil {
		t.Skip(err)
	}
	refused := func(err error) {
		t.Helper()
		var short *Shortage
		if !errors.As(err, &short) || !strings.Contains(err.Error(), l.of) {
			t.Fatalf("%v: it does not name the %s", err, l.of)
		}
	}
	f, known := Now()
	if !known || f.Bytes < 300<<20 || f.Bytes > 700<<20 {
		t.Fatalf("%v, with 700 MB below the limit", f)
	}
	for most := f.Bytes - 8<<20; most > 50<<20; most = most / 2 * 15 / 16 { // half of the idle bytes count as the largest idle piece
		if err := Check(most, most); err != nil {
			t.Fatalf("garbage does not count as free: %d bytes: %v", most, err)
		}
		b := make([]byte, most)
		refused(Check(f.Bytes, 1))
		runtime.KeepAlive(b)
	}
	var all [][]byte
	for len(all) < 1000 {
		if err := Check(3<<20, 3<<20); err != nil {
			refused(err)
			break
		}
		all = append(all, make([]byte, 3<<20))
	}
	if n := int64(len(all)) * 3 << 20; n < f.Bytes/2 || n > 700<<20 {
		t.Errorf("%d MB in pieces of 3 MB, of %v", n>>20, f)
	}
	runtime.KeepAlive(all)
}
