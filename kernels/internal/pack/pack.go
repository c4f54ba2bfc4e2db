// Package pack reads and writes the committed GPU modules. A unit, such as
// lean, has two files: lean.json says what its images are and what they were
// made of, and lean.bin holds them, each a DEFLATE stream of its own, one behind
// the other.
package pack

import (
	"bytes"
	"compress/flate"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
)

// ErrCorrupt is a manifest or an archive that is not what the build wrote.
var ErrCorrupt = errors.New("corrupt module")

// maxImage bounds what an image unpacks to: no allocation follows a number in
// a damaged file.
const maxImage = 64 << 20

// Manifest says what the images of a unit are and what they were made of.
type Manifest struct {
	Compiler string   `json:"compiler"` // with its version
	Options  []string `json:"options"`  // of every image; each has its --gpu-architecture besides
	Sources  []Source `json:"sources"`  // the unit, and the headers it includes, by name
	Images   []Image  `json:"images"`   // in the order of the archive

	// Entries has the kernels by name, and what the compiler says each takes.
	// Where images differ there is one number for each cubin.
	Entries map[string]string `json:"entries"`
}

// Source is a file of ours that a unit is made of.
type Source struct {
	Name   string `json:"name"`
	SHA256 string `json:"sha256"`
}

// Image is the code of a unit for one architecture: a cubin, or PTX text.
type Image struct {
	Arch   string `json:"arch"`   // sm_90: a cubin, compute_90: PTX
	Size   int    `json:"size"`   // bytes
	Packed int    `json:"packed"` // bytes in the archive
	SHA256 string `json:"sha256"`
}

// Target splits the architecture: 10*major + minor of the compute capability,
// and whether the image is PTX, which newer GPUs can load too.
func (i Image) Target() (capability int, ptx bool, err error) {
	number, isCubin := strings.CutPrefix(i.Arch, "sm_")
	if !isCubin {
		if number, ptx = strings.CutPrefix(i.Arch, "compute_"); !ptx {
			return 0, false, fmt.Errorf("architecture %q: %w", i.Arch, ErrCorrupt)
		}
	}
	if capability, err = strconv.Atoi(number); err != nil || capability < 10 {
		return 0, false, fmt.Errorf("architecture %q: %w", i.Arch, ErrCorrupt)
	}
	return capability, ptx, nil
}

// Parse reads a manifest.
func Parse(data []byte) (*Manifest, error) {
	m := &Manifest{}
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(m); err != nil {
		return nil, fmt.Errorf("manifest: %w: %w", ErrCorrupt, err)
	}
	for _, i := range m.Images {
		if _, _, err := i.Target(); err != nil {
			return nil, err
		}
		if i.Size < 0 || i.Size > maxImage || i.Packed < 0 {
			return nil, fmt.Errorf("image %s of %d bytes, %d packed: %w", i.Arch, i.Size, i.Packed, ErrCorrupt)
		}
	}
	return m, nil
}

// Format is the text that Parse reads.
func (m *Manifest) Format() ([]byte, error) {
	text, err := json.MarshalIndent(m, "", "\t")
	return append(text, '\n'), err
}

// Pack makes the archive of the images, and enters them in the manifest.
func (m *Manifest) Pack(archs []string, images [][]byte) (archive []byte, err error) {
	m.Images = nil
	var out bytes.Buffer
	for i, image := range images {
		start := out.Len()
		w, err := flate.NewWriter(&out, flate.BestCompression)
		if err != nil {
			return nil, err
		}
		if _, err := w.Write(image); err != nil {
			return nil, err
		}
		if err := w.Close(); err != nil {
			return nil, err
		}
		m.Images = append(m.Images, Image{Arch: archs[i], Size: len(image), Packed: out.Len() - start, SHA256: Sum(image)})
	}
	return out.Bytes(), nil
}

// Unpack is the image at this index of the manifest.
func (m *Manifest) Unpack(archive []byte, index int) ([]byte, error) {
	start := 0
	for _, i := range m.Images[:index] {
		start += min(i.Packed, len(archive)) // two of these don't overflow
		start = min(start, len(archive))
	}
	want := m.Images[index]
	if want.Packed > len(archive)-start {
		return nil, fmt.Errorf("image %s: archive of %d bytes ends within it: %w", want.Arch, len(archive), ErrCorrupt)
	}
	r := flate.NewReader(bytes.NewReader(archive[start : start+want.Packed]))
	image, err := io.ReadAll(io.LimitReader(r, int64(want.Size)+1))
	if err != nil {
		return nil, fmt.Errorf("image %s: %w: %w", want.Arch, ErrCorrupt, err)
	}
	if len(image) != want.Size {
		return nil, fmt.Errorf("image %s has %d bytes, want %d: %w", want.Arch, len(image), want.Size, ErrCorrupt)
	}
	if sum := Sum(image); sum != want.SHA256 {
		return nil, fmt.Errorf("image %s has SHA-256 %s, want %s: %w", want.Arch, sum, want.SHA256, ErrCorrupt)
	}
	return image, nil
}

// Stale says how this manifest differs from one that would be made now, as far
// as that can be said without compiling; "" if it doesn't.
func (m *Manifest) Stale(now *Manifest, archs []string) string {
	var have []string
	for _, i := range m.Images {
		have = append(have, i.Arch)
	}
	switch {
	case m.Compiler != now.Compiler:
		return fmt.Sprintf("made by %s, now it is %s", m.Compiler, now.Compiler)
	case !slices.Equal(m.Options, now.Options):
		return fmt.Sprintf("made with %q, now it is %q", m.Options, now.Options)
	case archs != nil && !slices.Equal(have, archs):
		return fmt.Sprintf("made for %q, now it is %q", have, archs)
	}
	return Changed(m.Sources, now.Sources)
}

// Changed names the sources that differ; "" if none does.
func Changed(then, now []Source) string {
	var names []string
	for _, s := range slices.Concat(then, now) {
		if !slices.Contains(then, s) || !slices.Contains(now, s) {
			if !slices.Contains(names, s.Name) {
				names = append(names, s.Name)
			}
		}
	}
	if names == nil {
		return ""
	}
	return "changed since: " + strings.Join(names, ", ")
}

// Sum is the SHA-256 of data in hexadecimal.
func Sum(data []byte) string {
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}
