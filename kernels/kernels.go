// Package kernels holds the code for GPUs: sources in CUDA C++, and the modules
// that were made of them, which are part of every binary. The README beside it
// says how they are made.
package kernels

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"sync"

	"gorgonia.org/leanattention/kernels/internal/pack"
)

// ErrNoImage is the error of a unit that does not exist, or has no code for a GPU
// of this compute capability.
var ErrNoImage = errors.New("no GPU module")

// Image returns the code of a unit for a GPU of this compute capability (10*major + minor: 90 is 9.0). It is the first of
// these that exists: the cubin for the capability; the newest cubin of the same major version that is not newer than the GPU;
// PTX, which the driver compiles. An image is unpacked once, and callers must not change it. Errors: [ErrNoImage].
func Image(unit string, capability int) ([]byte, error) { return built.image(unit, capability) }

// Headers returns the headers of units that are compiled at run time (attn_written.cuh), by their names. Callers must not change them.
func Headers() (map[string][]byte, error) { return readHeaders() }

var readHeaders = sync.OnceValues(func() (map[string][]byte, error) {
	entries, err := headers.ReadDir(".")
	if err != nil || len(entries) == 0 {
		return nil, fmt.Errorf("kernels: headers: %w%s", ErrNoImage, whyEmpty)
	}
	files := map[string][]byte{}
	for _, e := range entries {
		if files[e.Name()], err = headers.ReadFile(e.Name()); err != nil {
			return nil, err
		}
	}
	return files, nil
})

// built is what the build wrote.
var built = store{files: modules}

// store is a directory of modules.
type store struct {
	files fs.FS

	mu       sync.Mutex
	unpacked map[string][]byte // by unit and architecture
}

func (s *store) manifest(unit string) (*pack.Manifest, error) {
	text, err := fs.ReadFile(s.files, "modules/"+unit+".json")
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrInvalid) {
		return nil, fmt.Errorf("kernels: unit %q: %w%s", unit, ErrNoImage, whyEmpty)
	}
	if err != nil {
		return nil, fmt.Errorf("kernels: unit %q: %w", unit, err)
	}
	m, err := pack.Parse(text)
	if err != nil {
		return nil, fmt.Errorf("kernels: unit %q: %w", unit, err)
	}
	return m, nil
}

func (s *store) image(unit string, capability int) ([]byte, error) {
	m, err := s.manifest(unit)
	if err != nil {
		return nil, err
	}
	index := choose(m.Images, capability)
	if index < 0 {
		return nil, fmt.Errorf("kernels: unit %q for compute capability %d.%d: %w", unit, capability/10, capability%10, ErrNoImage)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	key := unit + " " + m.Images[index].Arch
	if image := s.unpacked[key]; image != nil {
		return image, nil
	}
	archive, err := fs.ReadFile(s.files, "modules/"+unit+".bin")
	var images [][]byte
	if err == nil {
		images, err = m.Unpack(archive)
	}
	if err != nil {
		return nil, fmt.Errorf("kernels: unit %q for compute capability %d.%d: %w", unit, capability/10, capability%10, err)
	}
	if s.unpacked == nil {
		s.unpacked = map[string][]byte{}
	}
	s.unpacked[key] = bytes.Clone(images[index]) // a copy: the others need not stay
	return s.unpacked[key], nil
}

// choose is the index of the image for a GPU, -1 if there is none. A cubin runs
// on GPUs of its major version that are as new, PTX on all that are as new; of
// what runs, any cubin is before any PTX, and newer before older.
func choose(images []pack.Image, capability int) int {
	best, bestRank := -1, -1
	for i, image := range images {
		target, ptx, err := image.Target()
		if err != nil || target > capability || !ptx && target/10 != capability/10 {
			continue
		}
		rank := target
		if !ptx {
			rank += 1 << 20
		}
		if rank > bestRank {
			best, bestRank = i, rank
		}
	}
	return best
}
