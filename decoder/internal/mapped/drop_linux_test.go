package mapped

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

// fileMemory returns the memory of the process that holds pages of files, in KB.
func fileMemory(t *testing.T) (kb int) {
	t.Helper()
	data, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Skip(err)
	}
	found := false
	for line := range strings.Lines(string(data)) {
		for _, field := range []string{"RssFile:", "RssShmem:"} { // a file in memory has pages of the second kind
			n := 0
			if rest, ok := strings.CutPrefix(line, field); ok {
				if _, err := fmt.Sscan(rest, &n); err != nil {
					t.Fatal(err)
				}
				kb, found = kb+n, true
			}
		}
	}
	if !found {
		t.Skip("the system does not tell the memory")
	}
	return kb
}

// TestDropMemory: Drop releases the pages of a mapping that were read.
func TestDropMemory(t *testing.T) {
	const size = 64 << 20
	f, err := Open(write(t, make([]byte, size)))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	before := fileMemory(t)
	sum := byte(0)
	for i := 0; i < size; i += 512 {
		sum += f.Bytes()[i]
	}
	read := fileMemory(t)
	f.Drop(f.Bytes())
	after := fileMemory(t)
	if read-before < size>>11 || after-before > size>>14 || sum != 0 {
		t.Errorf("%d KB before, %d after reading %d KB, %d after Drop", before, read, size>>10, after)
	}
}
