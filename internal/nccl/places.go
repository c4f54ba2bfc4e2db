package nccl

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"gorgonia.org/leanattention/internal/cuda/library"
)

// Variable names the library in the environment: a file, or a folder that has it. If it is
// set nothing else is tried.
const Variable = "LEANATTENTION_NCCL"

// search is where the library is looked for.
var search = library.Search{Variable: Variable, Names: []string{"libnccl.so.2"}, Folders: []string{filepath.Join("nvidia", "nccl", "lib")}}

// find opens the first library that will do.
func find(all []library.Place) (*Library, error) {
	var tried []string
	var first error
	for _, p := range all {
		files := p.Files()
		if len(files) == 0 {
			tried = append(tried, fmt.Sprintf("%s (%s): not there", p.Path, p.What))
		}
		for _, file := range files {
			l, err := LoadFrom(file)
			if err == nil {
				return l, nil
			}
			why := strings.TrimSuffix(strings.TrimSuffix(err.Error(), ": "+ErrNoNCCL.Error()), ": "+ErrTooOld.Error())
			tried = append(tried, fmt.Sprintf("%s (%s): %s", file, p.What, strings.TrimPrefix(why, file+": ")))
			if first == nil || errors.Is(err, ErrTooOld) {
				first = err
			}
		}
	}
	kind := ErrNoNCCL
	if errors.Is(first, ErrTooOld) {
		kind = ErrTooOld
	}
	return nil, fmt.Errorf("%w: looked for %s; pip install nvidia-nccl-cu12 has it, and %s may name it", kind, strings.Join(tried, ", "), Variable)
}
