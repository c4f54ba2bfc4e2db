package pack

import (
	"fmt"
	"io/fs"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"
)

// quoted finds what a file includes of ours. System headers, in angle brackets,
// come with the compiler and are named by its version.
var quoted = regexp.MustCompile(`(?m)^[ \t]*#[ \t]*include[ \t]*"([^"]*)"`)

// needed finds who needs a unit, in a comment of its source.
var needed = regexp.MustCompile(`(?m)^// Needed by: (.+)\.[ \t]*$`)

// Need is who needs the unit of this source, as a line "// Needed by: who." of it says; "" if
// none does.
func Need(source []byte) string {
	if m := needed.FindSubmatch(source); m != nil {
		return string(m[1])
	}
	return ""
}

// leftOut finds the architectures that a unit has no images for, in a comment of its source.
var leftOut = regexp.MustCompile(`(?m)^// No images for: (.+)\.[ \t]*$`)

// LeftOut returns the architectures that the unit of this source has no images for, as a line "// No images for: a, b." of it says.
// GPUs then run the image of an older one.
func LeftOut(source []byte) []string {
	if m := leftOut.FindSubmatch(source); m != nil {
		return strings.Split(string(m[1]), ", ")
	}
	return nil
}

// Units are the translation units of a directory: lean for lean.cu.
func Units(dir fs.FS) ([]string, error) {
	files, err := fs.Glob(dir, "*.cu")
	for i := range files {
		files[i] = strings.TrimSuffix(files[i], ".cu")
	}
	return files, err
}

// Read is the unit's source and all headers of ours that it includes, whatever
// the preprocessor would make of the conditions around them.
func Read(dir fs.FS, unit string) (files map[string][]byte, err error) {
	files = map[string][]byte{}
	for todo := []string{unit + ".cu"}; len(todo) > 0; todo = todo[1:] {
		name := todo[0]
		if files[name] != nil {
			continue
		}
		if path.Base(name) != name {
			return nil, fmt.Errorf("%s.cu includes %q: only files beside it can be", unit, name)
		}
		data, err := fs.ReadFile(dir, name)
		if err != nil {
			return nil, fmt.Errorf("sources of %s: %w", unit, err)
		}
		files[name] = append([]byte{}, data...) // an empty file is not nil
		for _, m := range quoted.FindAllSubmatch(data, -1) {
			todo = append(todo, string(m[1]))
		}
	}
	return files, nil
}

// Sources lists files for a manifest.
func Sources(files map[string][]byte) (list []Source) {
	for _, name := range slices.Sorted(maps.Keys(files)) {
		list = append(list, Source{name, Sum(files[name])})
	}
	return list
}
