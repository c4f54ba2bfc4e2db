package main

import (
	"bytes"
	"context"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/emulated/system"
)

// failingFrom is a standard error that has the driver's calls of a function fail once a text was written to it.
type failingFrom struct {
	bytes.Buffer
	after string
	fail  func()
}

func (w *failingFrom) Write(p []byte) (int, error) {
	n, err := w.Buffer.Write(p)
	if strings.Contains(w.String(), w.after) {
		w.fail()
	}
	return n, err
}

// What goes wrong in an op while a prompt is read is told as the op tells it: without the machine's instructions and nodes.
func TestGPUCause(t *testing.T) {
	for _, function := range []string{"cuLaunchKernelEx", "cuMemAlloc_v2"} {
		t.Run(function, func(t *testing.T) {
			lib := system.Emulate(t)
			if lib == nil {
				t.Skip("calls fail on demand on an emulated GPU only: LEANATTENTION_GPU=emulated")
			}
			const outOfMemory = 2
			log := &failingFrom{after: "\non GPU", fail: func() { lib.State().FailIn(function, outOfMemory) }}
			status := run(context.Background(), []string{"-device", "gpu", "-prompt", "Once", "-n", "1"}, nil, &bytes.Buffer{}, log)
			lines := strings.Split(strings.TrimSpace(log.String()), "\n")
			last := lines[len(lines)-1]
			if status != 1 || !strings.HasPrefix(last, "opt: leanattention: ") || !strings.Contains(last, strings.TrimSuffix(function, "_v2")) {
				t.Errorf("status %d, %s", status, log)
			}
			for _, dump := range []string{"PC ", "instruction", "Failed to", "op.Do", "Memory["} {
				if strings.Contains(last, dump) {
					t.Errorf("%q in %s", dump, last)
				}
			}
		})
	}
}
