package gpu

import (
	"errors"
	"testing"

	"gorgonia.org/leanattention/internal/cuda"
)

// Maps are made once, unless that fails, and not kept for ever.
func TestTensorMapsKept(t *testing.T) {
	var maps TensorMaps[int]
	made := 0
	get := func(key int) cuda.TensorMap {
		m, err := maps.Get(key, func() (cuda.TensorMap, error) {
			made++
			return cuda.TensorMap{uint64(key)}, nil
		})
		if err != nil || m[0] != uint64(key) {
			t.Fatalf("map %d is that of %d, %v", key, m[0], err)
		}
		return m
	}
	broken := errors.New("broken")
	if _, err := maps.Get(0, func() (cuda.TensorMap, error) { return cuda.TensorMap{1}, broken }); err != broken {
		t.Errorf("%v", err)
	}
	for i := range mostMaps + 10 {
		get(i)
		if before := made; get(i) != get(i) || made != before {
			t.Fatalf("map %d was made again", i)
		}
		if n := len(maps.of); n > mostMaps {
			t.Fatalf("%d maps", n)
		}
	}
	if made != mostMaps+10 {
		t.Errorf("%d maps were made", made)
	}
}
