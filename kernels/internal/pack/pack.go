// Package pack reads and writes the committed GPU modules. A unit, such as
// lean, has two files: lean.json says what its images are and what they were
// made of, and lean.bin holds them, packed as one.
package pack

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// ErrCorrupt is a manifest or an archive that is not what the build wrote.
var ErrCorrupt = errors.New("corrupt module")

// maxImages bounds what the images of a unit may take: no allocation follows a
// number in a damaged file.
const maxImages = 256 << 20

// EveryDecode is the need of units that each decode step may load.
const EveryDecode = "every decode"

// Manifest says what the images of a unit are and what they were made of.
type Manifest struct {
	Need     string   `json:"need"`     // who needs the unit: [EveryDecode], or what else it is there for
	Compiler string   `json:"compiler"` // with its version
	Options  []string `json:"options"`  // of every image; each has its --gpu-architecture besides
	Sources  []Source `json:"sources"`  // the unit, and the headers it includes, by name
	Images   []Image  `json:"images"`   // in the order of the archive
	Packed   int      `json:"packed"`   // bytes of the archive

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
	Arch   string `json:"arch"` // sm_90: a cubin, compute_90: PTX
	Size   int    `json:"size"` // bytes
	SHA256 string `json:"sha256"`
	PTX    string `json:"ptx,omitempty"` // SHA-256 of the PTX that a cubin for 9.0 was assembled from
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
	total := 0
	for _, i := range m.Images {
		if _, _, err := i.Target(); err != nil {
			return nil, err
		}
		if total += i.Size; i.Size < 0 || i.Size > maxImages || total > maxImages {
			return nil, fmt.Errorf("images of %d bytes: %w", total, ErrCorrupt)
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
	for i, image := range images {
		m.Images = append(m.Images, Image{Arch: archs[i], Size: len(image), SHA256: Sum(image)})
	}
	archive, err = squeeze(slices.Concat(images...))
	m.Packed = len(archive)
	return archive, err
}

// Unpack takes the images from an archive, in the order of the manifest.
func (m *Manifest) Unpack(archive []byte) (images [][]byte, err error) {
	total := 0
	for _, i := range m.Images {
		total += i.Size
	}
	data, err := unsqueeze(archive, total)
	if err != nil {
		return nil, fmt.Errorf("archive of %d bytes: %w", len(archive), err)
	}
	for _, i := range m.Images {
		image := data[:i.Size:i.Size]
		if sum := Sum(image); sum != i.SHA256 {
			return nil, fmt.Errorf("image %s has SHA-256 %s, want %s: %w", i.Arch, sum, i.SHA256, ErrCorrupt)
		}
		images, data = append(images, image), data[i.Size:]
	}
	return images, nil
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
	case !slices.Equal(have, archs):
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
