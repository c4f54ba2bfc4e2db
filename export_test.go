package leanattention

import (
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cuda"

	G "gorgonia.org/gorgonia"
)

// PendingLSE is the number of log-sum-exps that an attention node's op keeps.
func PendingLSE(n *G.Node) int {
	s := n.Op().(*attentionOp).lse
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.of)
}

// Slabs is a copy of all memory that c keeps keys and values in.
func Slabs(c *Cache) []byte {
	var all []byte
	c.eachSlab(func(_ attn.DType, bytes []byte) { all = append(all, bytes...) })
	return all
}

// PoisonFree writes NaN to every slot of the pages that nobody holds.
func PoisonFree(c *Cache) {
	c.mu.Lock()
	defer c.mu.Unlock()
	free, _ := c.pool.Lists()
	c.eachSlab(func(t attn.DType, bytes []byte) {
		page := len(bytes) / c.config.Pages
		for _, p := range free {
			poison(t, bytes[int(p)*page:(int(p)+1)*page])
		}
	})
}

// ZeroPages writes 0 to all memory of c.
func ZeroPages(c *Cache) {
	d, ok := c.store.(*devicePages)
	if !ok {
		c.eachSlab(func(_ attn.DType, bytes []byte) { clear(bytes) })
		return
	}
	for _, buffers := range [...][]*cuda.Buffer{d.keys, d.values} {
		for _, b := range buffers { // gigabytes, in benchmarks
			if err := b.Set(0, 0, b.Len()); err != nil {
				panic(err)
			}
		}
	}
}

func (c *Cache) eachSlab(visit func(attn.DType, []byte)) {
	v := c.testView()
	for i := range v.keys {
		for _, b := range [...]cpu.Buffer{v.keys[i], v.values[i]} {
			visit(b.DType, slabBytes(b))
		}
	}
	v.flush()
}

// Lengthen gives a sequence n tokens more, of whatever lies in free pages.
func Lengthen(s *Sequence, n int) {
	c := s.cache
	c.mu.Lock()
	defer c.mu.Unlock()
	var err error
	if s.table.Pages, err = c.pool.Take(s.table.Pages, c.pool.For(s.table.Tokens+n)-len(s.table.Pages)); err != nil {
		panic(err)
	}
	s.table.Tokens += n
	c.tokens += n
}

// testView is the memory of a cache as tests see it: the very memory of the host,
// or a copy of what is on a GPU.
type testView struct {
	*Cache
	keys, values []cpu.Buffer
}

func (c *Cache) testView() *testView {
	v := &testView{Cache: c}
	switch s := c.store.(type) {
	case *hostPages:
		v.keys, v.values = s.keys, s.values
	case *devicePages:
		v.each(func(b *cuda.Buffer, list *[]cpu.Buffer) error {
			slab := newBuffer(s.storage, int(b.Len())/s.storage.Size())
			*list = append(*list, slab)
			return b.Download(slabBytes(slab), 0)
		})
	}
	return v
}

// flush puts what was changed in a view back on the GPU.
func (v *testView) flush() {
	if _, ok := v.store.(*devicePages); !ok {
		return
	}
	i := 0
	v.each(func(b *cuda.Buffer, list *[]cpu.Buffer) error {
		i++
		return b.Upload(0, slabBytes((*list)[(i-1)/2]))
	})
}

// each visits the slabs of a cache on a GPU, when the GPU is done: keys and values
// by turns.
func (v *testView) each(visit func(*cuda.Buffer, *[]cpu.Buffer) error) {
	s := v.store.(*devicePages)
	if err := s.gpu.Synchronize(); err != nil {
		panic(err)
	}
	for i := range s.keys {
		for _, err := range [...]error{visit(s.keys[i], &v.keys), visit(s.values[i], &v.values)} {
			if err != nil {
				panic(err)
			}
		}
	}
}

func slabBytes(b cpu.Buffer) []byte {
	return unsafe.Slice((*byte)(b.Ptr), b.Len*b.DType.Size())
}

// poison fills memory with the NaN of an element type, little-endian.
func poison(t attn.DType, bytes []byte) {
	nan := map[attn.DType][]byte{
		attn.Float32:  {0, 0, 0xc0, 0x7f},
		attn.Float16:  {0, 0x7e},
		attn.BFloat16: {0xc0, 0x7f},
	}[t]
	for i := range bytes {
		bytes[i] = nan[i%len(nan)]
	}
}

// UseDriver takes the CUDA driver from another library until the test ends.
func UseDriver(t testing.TB, path string) {
	loadDriver = func() (*cuda.Driver, error) { return cuda.LoadFrom(path) }
	t.Cleanup(func() { loadDriver = cuda.Load })
}
