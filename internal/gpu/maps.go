package gpu

import (
	"sync"

	"gorgonia.org/leanattention/internal/cuda"
)

// mostMaps is how many tensor maps are kept; buffers come and go.
const mostMaps = 4096

// TensorMaps are tensor maps that were made once, by all that they are made of. A
// map says nothing but its key, so one that is kept stays right.
type TensorMaps[K comparable] struct {
	mu sync.Mutex
	of map[K]cuda.TensorMap
}

// Get is the map of a key, made by create if it is not there.
func (m *TensorMaps[K]) Get(key K, create func() (cuda.TensorMap, error)) (cuda.TensorMap, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if t, ok := m.of[key]; ok {
		return t, nil
	}
	t, err := create()
	if err != nil {
		return t, err
	}
	if m.of == nil || len(m.of) >= mostMaps {
		m.of = make(map[K]cuda.TensorMap)
	}
	m.of[key] = t
	return t, nil
}
