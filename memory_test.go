package leanattention_test

import (
	"errors"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/memory"
)

// TestCheckMemory: memory is enough to the byte.
func TestCheckMemory(t *testing.T) {
	defer memory.Replace(func() (memory.Free, bool) { return memory.Free{Bytes: 1000, Total: 2000, Of: "a test"}, true })()
	if err := la.CheckMemory(1000, 1000); err != nil {
		t.Error(err)
	}
	if err := la.CheckMemory(1001, 1); !errors.Is(err, la.ErrOutOfMemory) || !strings.Contains(err.Error(), "1001 bytes in host memory: 1000 of 2000 bytes of a test") {
		t.Error(err)
	}
	for _, x := range [][2]int64{{-1, -1}, {5, -1}, {5, 6}, {-5, 0}} {
		if err := la.CheckMemory(x[0], x[1]); !errors.Is(err, la.ErrShape) {
			t.Errorf("%v: %v", x, err)
		}
	}
	defer memory.Replace(func() (memory.Free, bool) { return memory.Free{}, false })()
	if err := la.CheckMemory(1<<62, 1<<62); err != nil {
		t.Errorf("a system that does not tell: %v", err)
	}
}
