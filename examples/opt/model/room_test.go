package model

import (
	"errors"
	"slices"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/examples/opt/hf"
	"gorgonia.org/leanattention/internal/memory"

	"gorgonia.org/tensor"
)

// The host is asked for room as a GPU is: for the weights in the type that they will
// have, and for the cache of every kind of attention, to the byte.
func TestCheckRoomOfHost(t *testing.T) {
	folder, err := hf.Open("../tiny")
	if err != nil {
		t.Fatal(err)
	}
	defer folder.Close()
	defer func(now func() (memory.Free, bool)) { memory.Now = now }(memory.Now)
	var free int64
	memory.Now = func() (memory.Free, bool) { return memory.Free{Bytes: free, Total: 1 << 40, Of: "a test"}, true }
	c := folder.Config()
	page := 2 * int64(c.Layers) * int64(c.HiddenSize) * pageSize // elements
	for name, x := range map[string]struct {
		o        Options
		matrices tensor.Dtype
		cache    int64
	}{
		"lean":           {Options{Capacity: []int{65, 1}}, tensor.Float32, 3 * page * 4},
		"float16":        {Options{Capacity: []int{65, 1}, Cache: la.Float16}, la.Float16, 3 * page * 2},
		"default":        {Options{Capacity: []int{65, 1}, Attention: Default}, tensor.Dtype{}, 2 * 65 * page / pageSize * 4},
		"fused":          {Options{Capacity: []int{65, 1}, Attention: Fused}, tensor.Float32, 0},
		"20,000 prompts": {Options{Capacity: slices.Repeat([]int{1}, 20_000)}, tensor.Float32, 20_000 * page * 4},
	} {
		free = x.cache + x.o.hostBytes(c)
		for p := range c.Weights() {
			w, err := folder.Tensor(p.Name, p.Shape...)
			if err != nil {
				t.Fatal(err)
			}
			if as := loadedAs(w, x.matrices); as != w.Dtype() {
				free += int64(w.Shape().TotalSize()) * int64(as.Size())
			}
		}
		if err := CheckRoom(folder, x.matrices, x.o); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		free--
		err = CheckRoom(folder, x.matrices, x.o)
		if !errors.Is(err, la.ErrOutOfMemory) {
			t.Errorf("%s: %v", name, err)
			continue
		}
		for _, text := range []string{"MB of converted weights", "MB of cache", "host memory", "a test"} {
			if !strings.Contains(err.Error(), text) {
				t.Errorf("%s: %q does not say %q", name, err, text)
			}
		}
	}
	memory.Now = func() (memory.Free, bool) { return memory.Free{}, false }
	if err := CheckRoom(folder, tensor.Float32, Options{Capacity: []int{9}}); err != nil {
		t.Errorf("a system that does not tell: %v", err)
	}
}
