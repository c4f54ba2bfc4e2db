package gpu

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/cuda/nvrtc"
	"gorgonia.org/leanattention/kernels"
)

// Virtual is the architecture whose PTX an emulated GPU executes, as compute_90. It is a variable for tests.
var Virtual = ""

// compiledOptions are those of all units that are compiled at run time, as of kernels/build.
var compiledOptions = []string{"--std=c++17", "-default-device"}

// Compiled returns the module of a unit's source, which is compiled if the user's cache does not have it. The source includes headers of
// [kernels.Headers].
func Compiled(dev *cuda.Device, source string) (*cuda.Module, error) {
	headers, err := kernels.Headers()
	if err != nil {
		return nil, err
	}
	compiler, err := nvrtc.Load()
	if err != nil {
		return nil, err
	}
	arch, err := archOf(dev, compiler)
	if err != nil {
		return nil, err
	}
	key := keyOf(compiler.Version(), arch, source, headers)
	dir := cacheDir()
	image := dir.read(key)
	if image == nil { // by several goroutines at once, so not while the device is locked
		const unit = "unit.cu"
		files := maps.Clone(headers)
		files[unit] = []byte(source)
		code, err := compiler.Compile(unit, files, arch, compiledOptions...)
		if err != nil {
			return nil, err
		}
		if image = code.Cubin; len(image) == 0 {
			image = code.PTX
		}
		dir.write(key, image)
	}
	return dev.Module(key, func() ([]byte, error) { return image, nil })
}

// archOf returns the architecture to compile for: the GPU's, the newest older one of the same major version, or a virtual one whose PTX
// the driver compiles. It returns an error if the driver is too old for what the compiler makes.
func archOf(dev *cuda.Device, c *nvrtc.Compiler) (string, error) {
	if Virtual != "" {
		return Virtual, nil
	}
	all, err := c.Capabilities()
	if err != nil {
		return "", err
	}
	ptx, cubin := dev.Driver().Takes(c.Numbers())
	if arch := targetOf(all, dev.Info().Capability, ptx, cubin); arch != "" {
		return arch, nil
	}
	return "", fmt.Errorf("NVRTC %s in %s is newer than the driver takes, which is for CUDA %s: install a newer driver, or an older NVRTC, which %s may name",
		c.Version(), c.Path(), dev.Driver().Version(), nvrtc.Variable)
}

// targetOf returns the architecture for a GPU, of those that a compiler has. It returns "" if the driver does not take what the GPU needs:
// ptx and cubin say whether the driver takes the compiler's PTX and cubins.
func targetOf(all []int, capability int, ptx, cubin bool) string {
	best := 0
	for _, have := range all {
		if have <= capability && have/10 == capability/10 {
			best = max(best, have)
		}
	}
	switch {
	case best == 90 && cubin:
		return "sm_90a"
	case best > 0 && cubin:
		return fmt.Sprintf("sm_%d", best)
	case best == 0 && ptx:
		return "compute_90"
	}
	return ""
}

// keyOf returns a hash of all that an image depends on.
func keyOf(version, arch, source string, headers map[string][]byte) string {
	h := sha256.New()
	part := func(name string, data []byte) { fmt.Fprintf(h, "%q %d\n%s\n", name, len(data), data) }
	part("compiler", []byte(version))
	part("arch", []byte(arch))
	part("options", []byte(strings.Join(compiledOptions, " ")))
	part("source", []byte(source))
	for _, name := range slices.Sorted(maps.Keys(headers)) {
		part(name, headers[name])
	}
	return hex.EncodeToString(h.Sum(nil))
}

// cache is a folder of images, which have their keys as names. A file begins with the hash of the rest, so that a torn file is none. An
// empty cache, "", keeps nothing. A file operation that fails counts as a missing file.
type cache string

const (
	cachedFiles = 256       // a cache has at most
	cachedBytes = 128 << 20 // of all files together
	cachedEnd   = ".image"
)

// cacheDir returns the user's cache.
func cacheDir() cache {
	dir, err := os.UserCacheDir()
	if err != nil {
		return ""
	}
	return cache(filepath.Join(dir, "leanattention", "compiled"))
}

func (c cache) file(key string) string { return filepath.Join(string(c), key+cachedEnd) }

// read returns the image of a key, or nil.
func (c cache) read(key string) []byte {
	if c == "" {
		return nil
	}
	data, err := os.ReadFile(c.file(key))
	if err != nil || len(data) <= sha256.Size {
		return nil
	}
	sum := sha256.Sum256(data[sha256.Size:])
	if !bytes.Equal(sum[:], data[:sha256.Size]) {
		return nil
	}
	now := time.Now()
	_ = os.Chtimes(c.file(key), now, now) // the oldest files are removed first
	return data[sha256.Size:]
}

// write keeps an image.
func (c cache) write(key string, image []byte) {
	if c == "" || os.MkdirAll(string(c), 0o700) != nil {
		return
	}
	temp, err := os.CreateTemp(string(c), "writing-*")
	if err != nil {
		return
	}
	sum := sha256.Sum256(image)
	_, err = temp.Write(append(sum[:], image...))
	if closed := temp.Close(); err == nil {
		err = closed
	}
	if err == nil {
		err = os.Rename(temp.Name(), c.file(key))
	}
	if err != nil {
		_ = os.Remove(temp.Name())
		return
	}
	c.trim()
}

// trim removes the least recently used files beyond the cache's limits, and unfinished files older than an hour.
func (c cache) trim() {
	entries, err := os.ReadDir(string(c))
	if err != nil {
		return
	}
	var files []os.FileInfo
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			continue
		}
		if strings.HasSuffix(e.Name(), cachedEnd) {
			files = append(files, info)
		} else if time.Since(info.ModTime()) > time.Hour {
			_ = os.Remove(filepath.Join(string(c), e.Name()))
		}
	}
	slices.SortFunc(files, func(a, b os.FileInfo) int { return b.ModTime().Compare(a.ModTime()) })
	total := int64(0)
	for i, f := range files {
		if total += f.Size(); i >= cachedFiles || total > cachedBytes {
			_ = os.Remove(filepath.Join(string(c), f.Name()))
		}
	}
}
